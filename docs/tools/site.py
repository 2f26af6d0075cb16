"""A hook of MkDocs (mkdocs.yml): pages link to files as in the repository, and the site has the files they link to.

README.md, CONTRIBUTING.md and code become pages under source/, because the site knows of no address of a repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?:(?<=\]\()|(?<=<img src=\")|(?<= srcset=\"))(?![a-z]+:)([^)#\s\"]+)(?=[)#\"])")
SHOWN = {".py": "python", ".sh": "bash", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside docs/ that is linked to, and to those that the added pages link to."""
    from mkdocs.structure.files import File

    waiting, seen = [_repository_path(file.src_uri) for file in files.documentation_pages()], set[str]()
    waiting += ["README.md", "CONTRIBUTING.md"]
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, _site_path(path), content=_content(path)))
        if path.endswith(".md"):
            waiting += targets(path)
    return files


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    """Return the page with its links to files turned to the pages of these files."""
    path = _repository_path(page.file.src_uri)
    return LINK.sub(lambda link: _link(path, link[1]), markdown)


def targets(path: str) -> Iterator[str]:
    """Yield the files of the repository to which a page of it links; a folder stands for its page."""
    for link in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        yield _target(path, link)


def _target(path: str, link: str) -> str:
    target = normpath(str(PurePosixPath(path).parent / link))
    pages = (f"{target}/{name}" for name in ("index.md", "README.md"))
    return next((page for page in pages if (ROOT / page).is_file()), target)


def _link(path: str, link: str) -> str:
    return relpath(_site_path(_target(path, link)), PurePosixPath(_site_path(path)).parent)


def _site_path(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith((".md", ".ipynb")) else f"source/{path}.md"


def _repository_path(uri: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    if not uri.startswith("source/"):
        return f"docs/{uri}"
    path = uri.removeprefix("source/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    language = SHOWN.get(PurePosixPath(path).suffix)
    if language is None:
        return text
    return f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {path}\n\n`````{language}\n{text}\n`````\n"
