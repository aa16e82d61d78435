"use strict";
// How a token, a tree, a node and the text are drawn; trace_page.js, which follows, steps through the
// rounds.
//
// Tokens are untrusted text: they reach the page as text nodes only, never as markup.
const trace = JSON.parse(document.getElementById("trace").textContent);
const byId = (id) => document.getElementById(id);
const rounds = trace.rounds;
const MARK = {
  root: "●", accepted: "✓", cut: "✂", rejected: "✕", beyond: "·", passenger: "◇",
  "left out": "–", empty: "·", last: "+",
};
const NAME = {
  root: "root", accepted: "accepted", cut: "accepted, cut off", rejected: "rejected",
  beyond: "not tested", passenger: "passenger", "left out": "left out", empty: "empty round",
  last: "the target’s own token",
};
const KIND = {
  correction: "the correction token: it takes the place of a rejected draft",
  bonus: "the bonus token: every token before it was accepted",
  plain: "nothing was drafted, so this is a step of plain decoding",
};
const TERMS = [
  ["root", "the last committed token; the draft grows from it"],
  ["p", "the probability of a token under the target’s law, after its parent in the tree"],
  ["q", "the probability with which the drafter drew the token; a token that was chosen (copied from the text, or the drafter’s best) instead of drawn has no q"],
  ["u", "a random number in [0, 1), drawn anew for each tested token: the rule accepts a token where u q < p, that is with probability min(1, p / q)"],
  ["correction token", "the target’s own token in place of a rejected draft"],
  ["bonus token", "the target’s own token after a path that was accepted to its end"],
  ["passenger", "a node that goes through the target only for the drafter and cannot be accepted"],
  ["τ", "acceptance length: tokens emitted per round, the target’s own token included; the first one shown, the pass over the end of the prompt, is left out"],
  ["#2", "the drafter’s second choice below the same parent"],
  ["· ⏎ ⇥", "a space, a line end, a tab within a token"],
];
const LAST = -2; // stands for a node's index: the target's own token after the accepted path
const view = { round: 0, node: 0, zoom: "auto", outline: null, order: [] }; // what is shown

// ---------------------------------------------------------------- text

const INVISIBLE =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/;
const SIGNS = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍" };

function code(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** Runs `[text, plain?]`: what cannot be seen is named; `keep`: white space stays as it is. */
function visible(text, keep) {
  const runs = [];
  for (const character of text) {
    const blank = keep ? null : SIGNS[character];
    const kept = keep && (character === "\n" || character === "\t");
    const hidden = !kept && character.length === 1 && INVISIBLE.test(character);
    const sign = blank || (hidden ? code(character) : null);
    const last = runs[runs.length - 1];
    if (last && last[1] === !sign) last[0] += sign || character;
    else runs.push([sign || character, !sign]);
  }
  return runs;
}

function label(id) {
  if (id < 0) return [["none", false]];
  const [text, kind] = trace.tokens[id];
  if (kind) return [[kind === "bytes" ? `‹${text}›` : text, false]];
  return text ? visible(text, false) : [["empty", false]];
}

function shorten(runs, most) {
  const kept = [];
  let left = most;
  const whole = runs.reduce((sum, [text]) => sum + [...text].length, 0) <= most;
  for (const [text, plain] of runs) {
    const letters = [...text];
    if (whole || letters.length < left) kept.push([text, plain]);
    else {
      kept.push([letters.slice(0, Math.max(0, left - 1)).join("") + "…", plain]);
      break;
    }
    left -= letters.length;
  }
  return kept;
}

/** In a tree there is room for less. */
const brief = (p) => figure(p).replace("0.", ".");

function figure(p) {
  if (p >= 0.995) return p >= 0.9995 ? "1" : p.toFixed(3);
  if (p >= 0.1) return p.toFixed(2);
  if (p >= 0.001) return p.toFixed(3);
  return p > 0 ? "<0.001" : "0";
}

// ---------------------------------------------------------------- elements

function make(name, attributes, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "tspan", "title"].includes(name);
  const made = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function spans(runs, name = "span") {
  return runs.map(([text, plain]) => make(name, plain ? {} : { class: "ws" }, text));
}

const plainly = (runs) => runs.map(([text]) => text).join("");
const css = (status) => status.replace(" ", "");

// ---------------------------------------------------------------- the tree

/** Children by node in draw order; the target's own token stands first, where it is seen. */
function childrenOf(round) {
  const children = round.parent.map(() => []);
  round.parent.forEach((above, node) => above >= 0 && children[above].push(node));
  if (round.kind !== "none" && round.path.length) children[round.path.at(-1)].unshift(LAST);
  return children;
}

/** Places `[{node, x, y}]` with the size of a box. Columns: depth to the right, siblings below each
 * other. Outline: a line each, indented where the tree branches. */
function lay(round, outline) {
  const children = childrenOf(round);
  const leaves = children.reduce((sum, below) => sum + (below.length ? 0 : 1), 0);
  const flat = outline || leaves > 14;
  const box = { w: flat ? 190 : 128, h: flat ? 28 : 44, flat };
  const pitch = flat ? 34 : 54;
  const places = [];
  let line = 0;
  const visit = (node, depth, indent) => {
    const place = { node, x: outline ? indent * 22 : depth * (box.w + 34), y: line * pitch };
    places.push(place);
    const below = node === LAST ? [] : children[node];
    below.forEach((child, index) => {
      if (outline || index > 0) line += 1;
      visit(child, depth + 1, indent + (below.length > 1 ? 1 : 0));
    });
  };
  visit(0, 0, 0);
  const w = Math.max(...places.map((place) => place.x)) + box.w;
  return { places, box, children, w, h: line * pitch + box.h };
}

function nodeOf(round, node) {
  if (node === LAST) {
    return { id: round.last, status: "last", p: round.p_last, q: null, why: KIND[round.kind] };
  }
  return {
    id: round.token[node], status: round.status[node], p: round.p[node], q: round.q[node],
    why: round.why[node],
  };
}

function figures(round, node, info) {
  if (node === 0) return "root";
  if (info.p === null || info.p === undefined) return "";
  let text = `p ${brief(info.p)}`;
  if (info.q !== null) text += `  q ${brief(info.q)}`;
  else if (node !== LAST) {
    const siblings = round.parent.flatMap((above, n) => (above === round.parent[node] ? [n] : []));
    if (siblings.length > 1) text += `  #${siblings.indexOf(node) + 1}`;
  }
  return text;
}

function edge(from, to, box, outline) {
  if (outline) {
    const x = from.x + 11, y = to.y + box.h / 2;
    if (to.x === from.x) return `M${x} ${from.y + box.h}V${to.y}`;
    return `M${x} ${from.y + box.h}V${y}H${to.x}`;
  }
  const x1 = from.x + box.w, y1 = from.y + box.h / 2, x2 = to.x, y2 = to.y + box.h / 2;
  if (y1 === y2) return `M${x1} ${y1}H${x2}`;
  const m = x1 + 15;
  return `M${x1} ${y1}H${m - 8}Q${m} ${y1} ${m} ${y1 + 8}V${y2 - 8}Q${m} ${y2} ${m + 8} ${y2}H${x2}`;
}

function drawItem(round, place, box) {
  const info = nodeOf(round, place.node);
  const status = info.status, gone = status === "left out";
  const name = gone ? [["left out", false]] : label(info.id);
  const base = box.flat ? 16 : 17;
  const words = `${plainly(name)}, ${NAME[status]}${info.p == null ? "" : `, p ${figure(info.p)}`}`;
  const item = make("g", {
    class: `item s-${css(status)}`, transform: `translate(${place.x} ${place.y})`,
    role: "treeitem", "aria-label": words, tabindex: "-1", "data-node": place.node,
  });
  item.append(make("title", {}, words));
  item.append(make("rect", { class: "halo", x: -3, y: -3, width: box.w + 6, height: box.h + 6, rx: 9 }));
  item.append(make("rect", { class: "box", width: box.w, height: box.h, rx: 6 }));
  item.append(make("text", { class: "mark", x: 8, y: base }, MARK[status]));
  const word = make("text", { x: 24, y: base });
  word.append(...spans(shorten(name, box.flat ? 8 : 12), "tspan"));
  item.append(word);
  const text = figures(round, place.node, info);
  const at = box.flat
    ? { x: box.w - 7, y: base, "text-anchor": "end" }
    : { x: 24, y: 32 };
  item.append(make("text", { class: "figures", ...at }, text));
  if (!gone && place.node !== 0 && info.p != null) {
    const most = box.w - 12;
    const rows = info.q === null ? [["p", info.p]] : [["p", info.p], ["q", info.q]];
    rows.forEach(([law, value], index) => {
      const y = box.h - (box.flat ? 2.75 : 3.5) * (rows.length - index) - 1.25;
      const height = box.flat ? 2 : 2.5;
      item.append(make("rect", { class: "track", x: 6, y, width: most, height, rx: 1 }));
      item.append(make("rect", { class: law, x: 6, y, width: most * value, height, rx: 1 }));
    });
  }
  return item;
}

function drawTree(round) {
  const outline = view.outline ?? byId("canvas").clientWidth < 620;
  byId("shape").textContent = outline ? "columns" : "outline";
  const { places, box, children, w, h } = lay(round, outline);
  const where = new Map(places.map((place) => [place.node, place]));
  const fitting = Math.min(1, (byId("canvas").clientWidth - 36) / (w + 8));
  const least = { fit: 0.3, auto: 0.8 }[view.zoom];
  const zoom = least ? Math.max(least, fitting) : view.zoom;
  const svg = make("svg", {
    width: (w + 8) * zoom, height: (h + 8) * zoom, viewBox: `-4 -4 ${w + 8} ${h + 8}`,
    role: "tree", "aria-label": "draft",
  });
  const kept = new Set(round.path), lines = [];
  children.forEach((below, node) => below.forEach((child) => {
    const kind = child === LAST ? 2 : kept.has(child) ? 1 : 0;
    const path = edge(where.get(node), where.get(child), box, outline);
    lines.push([kind, make("path", { class: `edge ${["", "kept", "last"][kind]}`, d: path })]);
  }));
  lines.sort((a, b) => a[0] - b[0]).forEach(([, line]) => svg.append(line)); // kept ones on top
  for (const place of places) svg.append(drawItem(round, place, box));
  byId("canvas").replaceChildren(svg);
  view.order = places.map((place) => place.node);
}

// ---------------------------------------------------------------- the selected node

function gauge(law, value) {
  const meter = make("div", { class: "meter" });
  const level = make("i", { class: law });
  level.style.width = `${Math.min(1, value) * 100}%`;
  meter.append(level);
  return make("div", { class: "gauge" }, make("span", {}, law), meter,
    make("span", { class: "value" }, figure(value)));
}

function drawNode(round) {
  const node = view.node, info = nodeOf(round, node), gone = info.status === "left out";
  const card = byId("node");
  const token = make("p", { class: "token" });
  token.append(...spans(gone ? [["left out", false]] : label(info.id)));
  const above = node === LAST ? round.path.at(-1) : round.parent[node];
  const parts = [node === LAST ? "after the accepted path" : `node ${node}`];
  if (!gone && info.id >= 0) parts.push(`token ${info.id}`);
  if (node > 0) {
    const siblings = round.parent.flatMap((up, n) => (up === above ? [n] : []));
    if (siblings.length > 1) parts.push(`child ${siblings.indexOf(node) + 1} of ${siblings.length}`);
  }
  if (node !== 0) parts.push(`after ${plainly(shorten(label(round.token[above]), 16))}`);
  const why = make("p", { class: "why" },
    make("b", { class: `c-${css(info.status)}`, "data-mark": MARK[info.status] }, NAME[info.status]),
    `: ${info.why}`);
  card.replaceChildren(token, make("p", { class: "place" }, parts.join(" · ")), why);
  if (info.p != null && node !== 0) {
    card.append(gauge("p", info.p));
    if (info.q !== null) card.append(gauge("q", info.q));
    const notes = [];
    if (trace.greedy) notes.push("p is the softmax at temperature 1. Greedy decoding takes the most probable token.");
    if (node !== LAST && info.q === null && !gone) {
      notes.push("No q: the drafter chose this token and did not draw it at random.");
    }
    if (/(^|[\s×])u(\s|$)/.test(info.why)) notes.push("u is a random number in [0, 1), drawn for this node.");
    if (/ρ/.test(info.why)) notes.push("ρ is the factor of k-SEQ, which makes up for several siblings.");
    if (notes.length) card.append(make("p", { class: "note" }, notes.join(" ")));
  }
  const top = round.top[node];
  if (!top) return;
  card.append(make("h2", {}, "The target’s most probable next tokens, with p"), drawTop(round, node, top));
  card.append(make("p", { class: "note" }, "✓ drafted and accepted · ✕ drafted and rejected · + the target’s own token"));
}

function drawTop(round, node, top) {
  const drafted = new Map();
  round.parent.forEach((above, child) => {
    const status = round.status[child];
    const counts = status !== "left out" && status !== "passenger";
    if (above === node && counts) {
      const kept = status === "accepted" || status === "cut";
      if (kept || !drafted.has(round.token[child])) drafted.set(round.token[child], status);
    }
  });
  const table = make("table", { class: "after" });
  for (const [id, p] of top) {
    let role = drafted.get(id);
    if (!role && node === round.path.at(-1) && id === round.last) role = "last";
    const word = make("td", { class: "word" });
    word.append(...spans(shorten(label(id), 15)));
    const meter = make("div", { class: "meter" }), level = make("i");
    level.style.width = `${p * 100}%`;
    meter.append(level);
    table.append(make("tr", {},
      make("td", { class: `role ${role ? `c-${css(role)}` : ""}` }, role ? MARK[role] : ""), word,
      make("td", { class: "level" }, meter), make("td", { class: "value" }, figure(p))));
  }
  return table;
}

// ---------------------------------------------------------------- the text so far

function piece(text, kind) {
  const made = make("span", { class: kind });
  for (const [run, plain] of visible(text, true)) {
    made.append(plain ? run : make("span", { class: "control" }, run));
  }
  return made;
}

function drawText() {
  const panel = byId("text");
  const parts = [piece(trace.prompt, "prompt")];
  for (let index = 0; index <= view.round && index < rounds.length; index++) {
    const round = rounds[index], now = index === view.round ? " now" : "";
    round.pieces.forEach((text, at) => {
      if (text) parts.push(piece(text, (round.drafted[at] ? "drafted" : "own") + now));
    });
  }
  panel.replaceChildren(...parts);
  panel.scrollTop = panel.scrollHeight;
}
