"""Draws the concept pages' pictures, laws.svg and trees.svg; make_pictures.py calls this."""

from pathlib import Path

HERE = Path(__file__).parent
INK, BLUE, ORANGE, GREEN, GRAY = "#222", "#4c6fbf", "#d9822b", "#3a8f5c", "#9a9a9a"


def svg(name: str, width: int, height: int, title: str, body: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="14" role="img">'
        f'<title>{title}</title><rect width="{width}" height="{height}" fill="#fff"/>'
    )
    (HERE / name).write_text("\n".join([head, *body, "</svg>\n"]), encoding="utf-8")


def text(x, y, words, color=INK, anchor="middle", size=14, weight="normal") -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{words}</text>'
    )


def bar(x, base, height, width, color, opacity=1.0) -> str:
    return (
        f'<rect x="{x}" y="{base - height:.1f}" width="{width}" height="{height:.1f}" '
        f'fill="{color}" fill-opacity="{opacity}"/>'
    )


def laws() -> None:
    p, q = (0.30, 0.25, 0.20, 0.15, 0.10), (0.15, 0.40, 0.05, 0.25, 0.15)
    kept = [min(a, b) for a, b in zip(p, q, strict=True)]
    rest = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    panels = [
        ("p (target) and q (drafter)", [(p, BLUE), (q, ORANGE)]),
        (f"min(p, q): accepted, {sum(kept):.2f}", [(kept, GREEN)]),
        (f"max(p - q, 0): residual, {sum(rest):.2f}", [(rest, GRAY)]),
    ]
    body, base, scale = [], 210, 380
    for i, (title, series) in enumerate(panels):
        left = 20 + i * 260
        body.append(text(left + 115, 30, title, weight="bold"))
        for j in range(5):
            x = left + 8 + j * 45
            for k, (values, color) in enumerate(series):
                wide = 16 if len(series) > 1 else 30
                body.append(bar(x + k * 17, base, values[j] * scale, wide, color))
            body.append(text(x + 16, base + 20, "abcde"[j]))
        body.append(f'<path d="M{left} {base}H{left + 230}" stroke="{INK}"/>')
    body += [text(60, 62, "p", BLUE, weight="bold"), text(80, 62, "q", ORANGE, weight="bold")]
    line = "accepted + residual = p, at each token: the output follows the target's law"
    body.append(text(400, 268, line))
    svg("laws.svg", 800, 290, "The laws p and q, what both cover, and the residual", body)


def node(x, y, word, kind) -> str:
    color = {"root": INK, "kept": GREEN, "lost": GRAY, "passenger": ORANGE}[kind]
    dash = ' stroke-dasharray="4 3"' if kind == "passenger" else ""
    fill = color if kind in ("root", "kept") else "#fff"
    ink = "#fff" if kind in ("root", "kept") else color
    return (
        f'<rect x="{x - 32}" y="{y - 14}" width="64" height="28" rx="8" fill="{fill}" '
        f'stroke="{color}" stroke-width="2"{dash}/>' + text(x, y + 5, word, ink, size=13)
    )


def edges(places, parents) -> list[str]:
    lines = []
    for i, above in enumerate(parents):
        if above >= 0:
            (a, b), (c, d) = places[above], places[i]
            lines.append(f'<path d="M{a} {b + 14}L{c} {d - 14}" stroke="{GRAY}" stroke-width="2"/>')
    return lines


def trees() -> None:
    body = [text(120, 28, "chain of three drafts", weight="bold")]
    body.append(text(520, 28, "tree of seven drafts and one passenger", weight="bold"))
    chain = [(120, 60), (120, 125), (120, 190), (120, 255)]
    body += edges(chain, (-1, 0, 1, 2))
    for place, word, kind in zip(
        chain, ("for", "x", "of", "xs"), ("root", "kept", "lost", "lost"), strict=True
    ):
        body.append(node(*place, word, kind))
    body.append(text(168, 130, "accepted", GREEN, "start", 12))
    body.append(text(168, 195, "rejected", GRAY, "start", 12))
    places = [(520, 60), (380, 125), (520, 125), (660, 125)]
    places += [(330, 190), (420, 190), (520, 190), (330, 255), (660, 190)]
    words = ("for", "x", "i", "_", "in", ",", "in", "xs", "in")
    kinds = ("root", "kept", "lost", "lost", "kept", "lost", "lost", "kept", "passenger")
    body += edges(places, (-1, 0, 0, 0, 1, 1, 2, 4, 3))
    body += [node(*x, word, kind) for x, word, kind in zip(places, words, kinds, strict=True)]
    body.append(text(700, 195, "passenger", ORANGE, "start", 12))
    body.append(
        text(372, 260, "the end of the accepted path: a bonus token follows", GREEN, "start", 12)
    )
    svg("trees.svg", 800, 290, "A chain and a tree of drafts", body)
