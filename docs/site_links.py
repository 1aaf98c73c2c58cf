"""Hook of mkdocs: the README and other files outside of `docs/`, which the guides link to, become pages of the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
ADDED = "files/"
"""Folder of the site with the files outside of `docs/`."""


def address(link: str, source: str) -> str:
    """Return the page for a relative link on the page `source`; both are paths in the repository."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return ADDED + (target if target.endswith(".md") else f"{target}.md")


def with_links(text: str, source: str) -> str:
    """Return the text of the page `source` with links to pages of the site."""
    page = address(posixpath.basename(source), source)
    return LINK.sub(lambda link: "](" + posixpath.relpath(address(link[1], source), posixpath.dirname(page)), text)


def on_files(files: Files, config: Any) -> Files:
    """Add the README and the files that it and the guides link to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts["README.md"] = (ROOT / "README.md").read_text("utf-8")
    for source, text in list(texts.items()):
        for link in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
            if not path.startswith("docs/") and path not in texts:
                content = (ROOT / path).read_text("utf-8")
                texts[path] = content if path.endswith(".md") else f"# {path}\n\n```\n{content}\n```\n"
    for source, text in texts.items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, address(posixpath.basename(source), source), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point relative links to the pages of the site."""
    uri = page.file.src_uri
    source = uri.removeprefix(ADDED) if uri.startswith(ADDED) else f"docs/{uri}"
    return with_links(markdown, source)
