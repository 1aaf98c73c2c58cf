"""`angle-llm data issues`: reads, pairs, writes, and says what came of it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from angle_llm.io import json_text, sync
from angle_llm.issue_pairs.clean import issue_text
from angle_llm.issue_pairs.duplicates import Claim, find_claims, find_named
from angle_llm.issue_pairs.fetch import Found, Wanted, is_marked, read_repository, read_single, requests_needed
from angle_llm.issue_pairs.github import GitHub, remove_abandoned
from angle_llm.issue_pairs.pairs import Made, Pair, count_kinds, make_pairs
from angle_llm.issue_pairs.records import Issue, IssueError, Key
from angle_llm.issue_pairs.settings import SPLITS, IssueSettings
from angle_llm.model.checks import ArtifactError, read_json

REPORT = "report.json"
MADE_BY = "angle-llm data issues"
"""Stands in the report: the files beside it may be replaced."""
_TEMPORARY = ".issues."


def issues_main(settings: IssueSettings) -> None:
    """Reads the repositories and writes the pairs.

    Raises:
        SettingsError: for a token that must not be sent.
        WebError, IssueError: for a server that refuses or is none, for a folder that holds files of others, and where no
            duplicate is found; earlier files stay as they are then.
    """
    token = settings.token(os.environ)
    out = settings.out.expanduser()
    _check_ours(out)
    hub = GitHub(
        settings.api, settings.cache_folder, token=token, refresh=settings.refresh, per_minute=settings.requests_per_minute,
        tell=lambda words: print(words, flush=True),
    )  # fmt: skip
    found = _read(hub, settings, has_token=token is not None)
    claims, now, unclear, absent = _claims(hub, found, settings)
    texts, left_out = _texts(found, settings)
    named = {frozenset(now.get(key, key) for key in both) for both in find_named(found.issues, found.comments)}
    made = make_pairs(found.issues, texts, claims, settings, named=named, absent={**absent, **left_out})
    report = {
        "made_by": MADE_BY,
        "repositories": sorted({issue.repo for issue in found.issues.values()}, key=str.lower),
        "issues": len(found.issues),
        "issues_left_out": _counted(left_out.values()),
        "pull_requests_left_out": len(found.pull_requests),
        "comments": sum(map(len, found.comments.values())),
        "listings_not_there": hub.not_there,
        **_account(claims, unclear, made),
        "pairs": count_kinds(made.pairs),
        "requests": {"made": hub.requests, "unchanged": hub.not_modified, "from_disk": hub.from_disk},
        "settings": _told(settings),
    }
    _show(report, hub)
    if not any(made.pairs.values()):
        raise IssueError(
            "no pair of duplicates was found, and nothing was written. See the counts above; --comments all finds those without "
            "a label, and without --since or --max-issues more is read."
        )
    _write(made.pairs, report, out)
    print(f"written to {settings.out}. The texts' licences are their authors'; keep the files to yourself.")


def _check_ours(out: Path) -> None:
    """Raises `IssueError` for a folder whose files would be replaced though this command did not write them."""
    there = [name for name in (*map(_file_of, SPLITS), REPORT) if (out / name).exists()]
    try:
        ours = not there or read_json(out / REPORT).get("made_by") == MADE_BY
    except (FileNotFoundError, ArtifactError):
        ours = False
    if not ours:
        raise IssueError(
            f"{out} holds {', '.join(there)}, and no {REPORT} of this command beside, so they are left alone. Choose another "
            "--out, or move them away."
        )


def _file_of(split: str) -> str:
    return f"{split}.jsonl.gz"


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(reasons).items()))


def _account(claims: Sequence[Claim], unclear: Mapping[str, int], made: Made) -> dict[str, Any]:
    """What came of the duplicates. They add up: those left out and those of `positives`, but for the same cluster, are all;
    negatives wanted are those not found and the rows that are none.
    """
    negatives = sum(not pair.label for rows in made.pairs.values() for pair in rows)
    return {
        "duplicates": _counted(claim.why for claim in claims),
        "duplicates_left_out": made.claims_left_out,
        "duplicates_unclear": dict(sorted(unclear.items())),
        "positives": made.positives(),
        "negatives_not_found": made.negatives_wanted - negatives,
    }


def _read(hub: GitHub, settings: IssueSettings, has_token: bool) -> Found:
    wanted = Wanted(settings.since_instant, settings.max_issues, settings.comments)
    total = 0
    for repo in dict.fromkeys(settings.repos):
        needed, words = requests_needed(hub, repo, wanted)
        total += needed
        print(words, flush=True)
    print(f"{total:,} requests for all of them, fewer for what is kept in {settings.cache_folder}", flush=True)
    if hub.limit:
        print(f"the server allows {hub.limit:,} an hour: {total / hub.limit:.1f} hours of them", flush=True)
    if not has_token:
        print(
            f"without a token (in {settings.token_variable}); with one GitHub allows 5,000 an hour, else 60", flush=True
        )
    found = Found()
    for repo in dict.fromkeys(settings.repos):
        read_repository(hub, repo, wanted, found)
        print(f"{repo}: read; {len(found.issues):,} issues so far", flush=True)
    return found


def _claims(
    hub: GitHub, found: Found, settings: IssueSettings
) -> tuple[list[Claim], dict[Key, Key], Counter[str], dict[Key, str]]:
    """The claims, those of moved issues under the name they have now; these names; what is unclear; and the targets that are
    missing, with the reason.
    """
    claims, unclear = find_claims(
        dict(found.issues), found.comments, settings.closing_days,
        lambda issue: settings.events and is_marked(hub, issue),
    )  # fmt: skip
    missing, now = dict[Key, str](), dict[Key, Key]()
    for target in sorted({claim.target for claim in claims} - set(found.issues)):
        if target in found.pull_requests:
            missing[target] = "the target is a pull request"
        elif not settings.fetch_targets:
            missing[target] = "the target is not among the issues read"
        elif (issue := read_single(hub, target)) is None:
            missing[target] = "the target is not there, or not to be seen"
        elif issue.is_pull_request:
            missing[target] = "the target is a pull request"
        else:
            found.issues.setdefault(issue.key, issue)
            now[target] = issue.key
    return [claim._replace(target=now.get(claim.target, claim.target)) for claim in claims], now, unclear, missing


def _texts(found: Found, settings: IssueSettings) -> tuple[dict[Key, str], dict[Key, str]]:
    """The texts, and why issues have none."""
    people = {issue.author.lower() for issue in found.issues.values()}
    people |= {comment.author.lower() for comments in found.comments.values() for comment in comments}
    texts, left_out = dict[Key, str](), dict[Key, str]()
    for key, issue in found.issues.items():
        text = issue_text(issue.title, issue.body, people, settings.max_characters)
        if reason := _left_out(issue, text, settings):
            left_out[key] = reason
        else:
            texts[key] = text
    return texts, left_out


def _left_out(issue: Issue, text: str, settings: IssueSettings) -> str:
    if issue.by_bot and not settings.bots:
        return "opened by a bot"
    return "too short" if len(text) < settings.min_characters else ""


def _told(settings: IssueSettings) -> dict[str, Any]:
    """What decides the pairs; no place of this machine."""
    places = ("out", "cache", "api", "token_variable", "refresh", "requests_per_minute")
    return {item.name: getattr(settings, item.name) for item in fields(settings) if item.name not in places}


def _write(pairs: Mapping[str, Sequence[Pair]], report: Mapping[str, Any], out: Path) -> None:
    """Each file whole or not at all; a split without pairs has none. The report is written last; one that says so stands in its
    place until then.
    """
    out.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out, _TEMPORARY)
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=out))
    try:
        _write_report({"made_by": MADE_BY, "pairs": "the run that writes them was not finished"}, temporary, out)
        for split, rows in pairs.items():
            name = _file_of(split)
            if not rows:
                (out / name).unlink(missing_ok=True)
                continue
            with (temporary / name).open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                for pair in rows:
                    packed.write(json.dumps(pair.row(), ensure_ascii=False).encode() + b"\n")
            sync(temporary / name)
            (temporary / name).replace(out / name)
        _write_report(report, temporary, out)
        sync(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_report(report: Mapping[str, Any], temporary: Path, out: Path) -> None:
    (temporary / REPORT).write_text(json_text(report), encoding="utf-8")
    sync(temporary / REPORT)
    (temporary / REPORT).replace(out / REPORT)


def _show(report: Mapping[str, Any], hub: GitHub) -> None:
    for name in (
        "issues", "issues_left_out", "pull_requests_left_out", "comments", "listings_not_there", "duplicates",
        "duplicates_left_out", "duplicates_unclear", "positives", "negatives_not_found",
    ):  # fmt: skip
        value = report[name]
        told = (
            ", ".join(f"{kind} {count:,}" for kind, count in value.items()) if isinstance(value, dict) else f"{value:,}"
        )
        print(f"{name.replace('_', ' ')}: {told or 'none'}")
    for split, kinds in report["pairs"].items():
        told = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
        print(f"{split}: {sum(kinds.values()):,} pairs{f' ({told})' if told else ''}")
    print(
        f"requests made: {hub.requests:,}, of them unchanged (304): {hub.not_modified:,}; pages from disk: {hub.from_disk:,}"
    )
