# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Makes the site's links work: pages link to files of the repository that lie outside docs/.

Such files join the site under `repository/`, and README.md is its first page. `mkdocs build --strict` then refuses
every link to a file or heading that does not exist.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)((?:#[\w-]+)?)\)")


def in_site(path: str) -> str:
    """The place in the site of a file of the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def in_repository(place: str) -> str:
    """The file of the repository at a place in the site."""
    if place == "index.md":
        return "README.md"
    return place.removeprefix("repository/") if place.startswith("repository/") else f"docs/{place}"


def target_of(link: str, page: str) -> str:
    """The file that a link of a page leads to; a folder is shown by its README."""
    path = normpath(f"{dirname(page)}/{link}".lstrip("/"))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def on_files(files, config):
    """Adds what pages link to, and what those pages link to."""
    waiting = ["README.md", *(in_repository(file.src_uri) for file in files.documentation_pages())]
    while waiting:
        page = waiting.pop()
        if files.get_file_from_path(in_site(page)) is None:
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, in_site(page), abs_src_path=str(ROOT / page), inclusion=level))
        if page.endswith(".md"):
            targets = {target_of(link, page) for link, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8"))}
            new = {path for path in targets if not files.get_file_from_path(in_site(path))}
            waiting += sorted(path for path in new if (ROOT / path).is_file())
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links between files of the repository as links between places of the site."""
    here = page.file.src_uri

    def moved(match):
        path = target_of(match[1], in_repository(here))
        return f"]({relpath(in_site(path), dirname(here) or '.')}{match[2]})"

    return LINK.sub(moved, markdown)
