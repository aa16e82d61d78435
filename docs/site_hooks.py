"""What the site needs beyond the pages: files that stand elsewhere in the repository, and links.

The pages link to files of the repository by relative paths, which a repository's page follows. The
site shows some of those files as pages of its own (`MOUNTED`). A link to any other file becomes a
link into the repository if `repo_url` is set, else plain text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
MOUNTED = {  # path in the repository -> path in the site
    "benchmarks/results": "mounted/results",
    "specjax/checkpoints/README.md": "mounted/checkpoints/README.md",
    "CHANGELOG.md": "mounted/CHANGELOG.md",
    "CONTRIBUTING.md": "mounted/CONTRIBUTING.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def mounted(path: str) -> str | None:
    """Where the site shows a file of the repository; None: nowhere."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    for source, place in MOUNTED.items():
        if path == source or path.startswith(source + "/"):
            return place + path.removeprefix(source)
    return None


def on_files(files, config):
    for source, place in MOUNTED.items():
        start = ROOT / source
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.suffix in (".md", ".png", ".svg"):
                uri = place + path.as_posix().removeprefix(start.as_posix())
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    back = {place: source for source, place in MOUNTED.items()}
    here = next((back[p] + uri.removeprefix(p) for p in back if uri.startswith(p)), "docs/" + uri)

    def rewritten(match):
        image, label, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        place = mounted(path) or mounted(path + "/README.md")
        if place is not None and files.get_file_from_path(place) is None:
            place = mounted(path + "/README.md")
        if place is not None and files.get_file_from_path(place) is not None:
            found = posixpath.relpath(place, posixpath.dirname(uri) or ".")
            return f"{image}[{label}]({found}{'#' * bool(anchor)}{anchor})"
        if path.startswith("docs/") or not (ROOT / path).exists():
            return match[0]  # mkdocs warns, and `--strict` fails
        if config.repo_url:
            return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return label if path in label or "`" in label else f"{label} (`{path}`)"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(p if p.startswith("```") else LINK.sub(rewritten, p) for p in parts)
