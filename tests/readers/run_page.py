"""Run in the environment `integrations`: the code of docs/integrations.md, section by section.

    python run_page.py JOB.json OUT.json

JOB: `sections` (title → blocks of code), `claims` (name → code that sets `rows`), `texts`, `questions`. OUT has, for each block,
what it computed for `texts` and for each question; for each claim the rows or the error; and the addresses outside of this
machine that a block looked up. Needs nothing of angle_llm.
"""

import ast
import json
import sys
from pathlib import Path

import numpy as np

LOOKED_UP = []


def refuse_the_network(event, arguments):
    """Refuse every address but 127.0.0.1. Only Python is watched, not the Rust code of Chroma and LanceDB."""
    place = {"socket.connect": 1, "socket.getaddrinfo": 0}.get(event)
    if place is not None and "127.0.0.1" not in str(arguments[place]):
        LOOKED_UP.append(str(arguments[place]))
        raise OSError("no network in this test")


def assigned(statement):
    """Return the names that an assignment sets; nothing for other statements."""
    if not isinstance(statement, ast.Assign):
        return set()
    return {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def run(code, names):
    exec(compile(code, "docs/integrations.md", "exec"), names)


def run_section(blocks, texts, questions):
    """Return the results of each block. For further questions, only the assignments that depend on `question` run again."""
    names, dependent, again, results = {"texts": texts, "question": questions[0]}, {"question"}, [], []
    for block in blocks:
        run(block, names)
        found = set()
        for statement in ast.parse(block).body:
            found |= assigned(statement)
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            if assigned(statement) and used & dependent:
                dependent |= assigned(statement)
                again.append(ast.unparse(statement))
        found &= {"rows", "documents", "query", "nearest"}
        result = {name: names[name] for name in found - {"query", "nearest"}}
        for question in questions if found & {"query", "nearest"} else []:
            names["question"] = question
            run("\n".join(again), names)
            for name in found & {"query", "nearest"}:
                result.setdefault(name, []).append(names[name])
        results.append(result)
    return results


def main(job_path, out):
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    sys.addaudithook(refuse_the_network)
    claims = {}
    for name, code in job["claims"].items():  # first: LlamaIndex brings the tokenizer that LangChain downloads
        names = {"texts": job["texts"]}
        try:
            run(code, names)
            claims[name] = names["rows"]
        except Exception as error:
            claims[name] = f"{type(error).__name__}: {error}"
    LOOKED_UP.clear()
    results = {title: run_section(blocks, job["texts"], job["questions"]) for title, blocks in job["sections"].items()}
    found = {"sections": results, "looked_up": LOOKED_UP, "claims": claims}
    as_lists = lambda value: value.tolist() if isinstance(value, np.ndarray | np.floating) else list(value)  # noqa: E731
    Path(out).write_text(json.dumps(found, default=as_lists), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
