"""`angle-llm data issues`: reads, pairs, writes, and says what came of it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from angle_llm.artifact import sync
from angle_llm.data_tools.keys import near
from angle_llm.issue_pairs.clean import issue_text
from angle_llm.issue_pairs.duplicates import Claim, find_claims
from angle_llm.issue_pairs.fetch import Found, Wanted, is_marked, read_repository, read_single, requests_needed
from angle_llm.issue_pairs.github import GitHub
from angle_llm.issue_pairs.pairs import Pair, count_kinds, make_pairs
from angle_llm.issue_pairs.records import Issue, IssueError, Key
from angle_llm.issue_pairs.settings import IssueSettings

REPORT = "report.json"


def issues_main(settings: IssueSettings) -> None:
    """Reads the repositories and writes the pairs.

    Raises:
        SettingsError: for a token that must not be sent.
        WebError, IssueError: for a server that refuses or is none, and where no duplicate is found.
    """
    token = settings.token(os.environ)
    hub = GitHub(
        settings.api, settings.cache_folder, token=token, refresh=settings.refresh, per_minute=settings.requests_per_minute,
        tell=lambda words: print(words, flush=True),
    )  # fmt: skip
    found = _read(hub, settings, has_token=token is not None)
    claims, counts = _claims(hub, found, settings)
    texts, left_out = _texts(found, settings)
    pairs = make_pairs(found.issues, texts, claims, settings)
    report = {
        "repositories": sorted({issue.repo for issue in found.issues.values()}, key=str.lower),
        "issues": len(found.issues),
        "issues_left_out": dict(sorted(left_out.items())),
        "pull_requests_left_out": len(found.pull_requests),
        "comments": sum(map(len, found.comments.values())),
        **counts,
        "duplicates_of_the_same_text": sum(
            near(texts[one]) == near(texts[other]) for one, other, _ in claims if one in texts and other in texts
        ),
        "pairs": count_kinds(pairs),
        "requests": {"made": hub.requests, "unchanged": hub.not_modified, "from_disk": hub.from_disk},
        "settings": _told(settings),
    }
    _write(pairs, report, settings.out.expanduser())
    _show(report, hub, settings)
    if not any(pairs.values()):
        raise IssueError(
            "no pair of duplicates was found. See the counts above; --comments all finds those without a label, and without "
            "--since or --max-issues more is read."
        )


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


def _claims(hub: GitHub, found: Found, settings: IssueSettings) -> tuple[list[Claim], dict[str, Any]]:
    """The claims, those of moved issues under the name they have now; and what is to be told of them."""
    claims, unclear = find_claims(
        dict(found.issues), found.comments, settings.closing_days,
        lambda issue: settings.events and is_marked(hub, issue),
    )  # fmt: skip
    missing, now = Counter[str](), dict[Key, Key]()
    for target in sorted({claim.target for claim in claims} - set(found.issues)):
        if target in found.pull_requests:
            reason, issue = "a pull request", None
        elif not settings.fetch_targets:
            reason, issue = "not among the issues read", None
        else:
            issue = read_single(hub, target)
            reason = (
                "not there, or not to be seen" if issue is None else "a pull request" if issue.is_pull_request else ""
            )
        if issue is None or issue.is_pull_request:
            missing[reason] += 1
            continue
        found.issues.setdefault(issue.key, issue)
        now[target] = issue.key
    moved = [claim._replace(target=now.get(claim.target, claim.target)) for claim in claims]
    moved = [claim for claim in moved if claim.duplicate != claim.target]
    return moved, {
        "duplicates": dict(sorted(Counter(claim.why for claim in moved).items())),
        "duplicates_unclear": dict(sorted(unclear.items())),
        "targets_missing": dict(sorted(missing.items())),
    }


def _texts(found: Found, settings: IssueSettings) -> tuple[dict[Key, str], Counter[str]]:
    people = {issue.author.lower() for issue in found.issues.values()}
    people |= {comment.author.lower() for comments in found.comments.values() for comment in comments}
    texts, left_out = dict[Key, str](), Counter[str]()
    for key, issue in found.issues.items():
        text = issue_text(issue.title, issue.body, people, settings.max_characters)
        reason = _left_out(issue, text, settings)
        if reason:
            left_out[reason] += 1
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
    """Each file whole or not at all; a split without pairs has none. The report is written last."""
    out.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".issues.", dir=out))
    try:
        (out / REPORT).unlink(missing_ok=True)  # of files that are about to change
        for split, rows in pairs.items():
            name = f"{split}.jsonl.gz"
            if not rows:
                (out / name).unlink(missing_ok=True)
                continue
            with (temporary / name).open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                for pair in rows:
                    packed.write(json.dumps(pair.row(), ensure_ascii=False).encode() + b"\n")
            sync(temporary / name)
            (temporary / name).replace(out / name)
        (temporary / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (temporary / REPORT).replace(out / REPORT)
        sync(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _show(report: Mapping[str, Any], hub: GitHub, settings: IssueSettings) -> None:
    for name in (
        "issues", "issues_left_out", "pull_requests_left_out", "comments", "duplicates",
        "duplicates_of_the_same_text", "duplicates_unclear", "targets_missing",
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
    print(f"written to {settings.out}. The texts' licences are their authors'; keep the files to yourself.")
