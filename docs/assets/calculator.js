// The calculator of docs/howto/calculator.md, computed in the browser.
//
// `calculate` is specjax/analysis/calculator.py once more, for chains and for trees with a fixed
// number of children at each depth; its arguments and results have the names of the Python
// function. tests/test_calculator.py holds both to the values of tests/golden/calculator.json.
"use strict";

function calculate(given) {
  const {
    acceptance = null, tau = null, draft_cost = 0.05, num_draft = null, tree = null,
    parallel = false, overhead = 0, draft_overhead = 0, read_cost = draft_cost, knee = Infinity,
    passes = null, batch = 1, prompt = 0, new_tokens = 128, pass_seconds = 1, most = 16,
  } = given;
  const single = acceptance === null || typeof acceptance === "number";
  const counts = tree || Array(num_draft || (single ? 4 : acceptance.length)).fill(1);
  const rates = ratesOf(acceptance, tau, counts, most);
  const pass = (tokens) => Math.max(1, tokens / knee);
  const known = passesOf(passes);
  const widest = known.length ? known[known.length - 1][0] : Infinity;
  const verification = (nodes) =>
    known.length ? pass(batch) * between(known, nodes) : pass(batch * nodes);

  // of a draft with `children[d]` children below each node of depth d; none: plain decoding
  function outlook(children) {
    const plain = pass(batch) + overhead;
    let level = 1, nodes = 1, tokens = 1, path = 1, drafting = 0;
    children.forEach((count, depth) => {
      drafting += pass(batch * level);
      level *= count;
      nodes += level;
      path *= sum(rates[depth].slice(0, count));
      tokens += path;
    });
    if (parallel && children.length) drafting = pass(batch * children.length);
    const beside = children.length ? draft_overhead : 0;
    const cost = (verification(nodes) + draft_cost * drafting + beside + overhead) / plain;
    const reading = pass_seconds * (prompt ? pass(batch * prompt) : 0);
    const read = reading * (children.length ? 1 + read_cost : 1);
    const round = cost * plain * pass_seconds;
    const later = new_tokens - (prompt ? 1 : 0); // reading a prompt emits the first token
    const seconds = read + (later / tokens) * round;
    return {
      num_draft: nodes - 1,
      tokens,
      cost,
      speedup: tokens / cost,
      whole_speedup: (reading + later * plain * pass_seconds) / seconds,
      ttft: read || round,
      tpot: round / tokens,
      seconds,
      throughput: (batch * new_tokens) / seconds,
    };
  }

  const longest = Math.min(rates.length, widest - 1);
  const chains = Array.from({ length: longest + 1 }, (_, n) => outlook(Array(n).fill(1)));
  const best = chains.reduce((a, b) => (b.speedup > a.speedup ? b : a));
  return { asked: outlook(counts), plain: chains[0], best, chains, acceptance: rates };
}

function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}

// measured costs of passes, [nodes, cost], in ascending order of the nodes
function passesOf(given) {
  const known = [...(given || [])].sort((a, b) => a[0] - b[0]);
  if (known.length && (known[0][0] !== 1 || known[0][1] !== 1
    || !known.every(([nodes, cost]) => Number.isInteger(nodes) && cost > 0))) {
    throw new Error("passes: give costs above 0 relative to a pass over one node: 1:1 4:1.1");
  }
  return known;
}

// the cost of a pass over so many nodes, interpolated between those that are known
function between(known, nodes) {
  const above = known.findIndex(([wide]) => wide >= nodes);
  if (above < 0) {
    const widest = known[known.length - 1][0];
    throw new Error(`passes: the widest has ${widest} nodes, the draft with its root ${nodes}`);
  }
  const [wide, cost] = known[above];
  if (wide === nodes) return cost;
  const [narrow, less] = known[above - 1];
  return less + ((cost - less) * (nodes - narrow)) / (wide - narrow);
}

// the rates by depth and rank among siblings
function ratesOf(acceptance, tau, counts, most) {
  if ((acceptance === null) === (tau === null)) throw new Error("give acceptance or τ");
  if (tau !== null) {
    if (Math.max(...counts) > 1) throw new Error("τ is that of a chain; give rates for a tree");
    acceptance = rateOf(tau, counts.length);
  }
  const given = typeof acceptance === "number"
    ? Array(Math.max(counts.length, most)).fill([acceptance])
    : acceptance.map((row) => (typeof row === "number" ? [row] : row));
  for (const row of given) {
    if (!row.every((rate) => rate >= 0 && rate <= 1)) throw new Error("give rates from 0 to 1");
    if (sum(row) > 1 + 1e-9) throw new Error("the rates of one depth sum to more than 1");
  }
  if (counts.length > given.length) throw new Error("give a rate for each depth of the draft");
  if (counts.some((count, depth) => count > given[depth].length)) {
    throw new Error("give a rate for each rank of the tree: 0.7,0.1 0.6,0.1");
  }
  return given;
}

// the rate at every position with which a chain emits tau tokens per round
function rateOf(tau, num_draft) {
  if (!(tau >= 1 && tau <= num_draft + 1)) {
    throw new Error(`τ of ${num_draft} drafted tokens lies from 1 to ${num_draft + 1}`);
  }
  let low = 0, high = 1;
  while (high - low > 1e-12) {
    const middle = (low + high) / 2;
    let tokens = 1;
    for (let n = 1; n <= num_draft; n++) tokens += middle ** n;
    if (tokens < tau) low = middle; else high = middle;
  }
  return high;
}

// ------------------------------------------------------------------ the page

// what the fields of the form say, as `calculate` takes it
function fieldsOf(form) {
  const words = (name) => form.elements[name].value.trim();
  const number = (name, least) => {
    const value = Number(words(name));
    if (words(name) === "" || !(value >= least)) {
      throw new Error(`${name}: give a number from ${least} on`);
    }
    return value;
  };
  const whole = (name, least) => {
    const value = number(name, least);
    if (!Number.isInteger(value)) throw new Error(`${name}: give a whole number`);
    return value;
  };
  const rows = words("acceptance").split(/\s+/).filter(Boolean)
    .map((word) => word.split(",").map(Number));
  const tree = words("tree") ? words("tree").split("x").map(Number) : null;
  const nodes = tree ? tree.reduce(([n, all], c) => [n * c, all + n * c], [1, 1])[1] : 0;
  if (tree && !(tree.every((c) => Number.isInteger(c) && c > 0) && nodes <= 1024)) {
    throw new Error("tree: give children at each depth, such as 3x2x1, at most 1024 nodes");
  }
  const single = rows.length === 1 && rows[0].length === 1;
  const costs = words("passes").split(/\s+/).filter(Boolean)
    .map((word) => word.split(":").map(Number));
  if (!costs.every((pair) => pair.length === 2)) {
    throw new Error("passes: give pairs of nodes and cost, such as 1:1 4:1.1 8:1.4");
  }
  return {
    acceptance: rows.length === 0 ? null : single ? rows[0][0] : rows,
    tau: words("tau") ? number("tau", 1) : null,
    draft_cost: number("draft_cost", 0),
    num_draft: tree ? null : Math.min(whole("num_draft", 1), 1023),
    tree,
    parallel: form.elements.parallel.checked,
    overhead: number("overhead", 0),
    draft_overhead: number("draft_overhead", 0),
    read_cost: words("read_cost") ? number("read_cost", 0) : undefined,
    passes: costs.length ? costs : null,
    knee: words("knee") ? number("knee", 1) : Infinity,
    batch: whole("batch", 1),
    prompt: whole("prompt", 0),
    new_tokens: whole("new_tokens", 1),
    pass_seconds: Math.max(number("pass_ms", 0), 1e-9) / 1000,
  };
}

function tableOf(found) {
  const head = ["drafts", "tokens a round", "cost of a round", "× plain", "whole", "TTFT, ms",
    "TPOT, ms", "tokens/s"];
  const cells = (one, name) => [name, one.tokens.toFixed(2), one.cost.toFixed(2),
    one.speedup.toFixed(2), one.whole_speedup.toFixed(2), (1000 * one.ttft).toPrecision(4),
    (1000 * one.tpot).toPrecision(3), one.throughput.toPrecision(4)];
  const asked = JSON.stringify(found.asked);
  const rows = found.chains.map((one) => [one, String(one.num_draft || "plain")]);
  if (!found.chains.some((one) => JSON.stringify(one) === asked)) rows.push([found.asked, "tree"]);
  const row = (values, tag) => `<tr>${values.map((v) => `<${tag}>${v}</${tag}>`).join("")}</tr>`;
  const body = rows.map(([one, name]) => {
    const line = row(cells(one, name), "td");
    return JSON.stringify(one) === asked ? line.replaceAll("<td>", '<td style="font-weight:700">')
      : line;
  });
  return `<table><thead>${row(head, "th")}</thead><tbody>${body.join("")}</tbody></table>`;
}

// the speed-up of chains against their length; a ring marks what was asked for
function drawingOf(found) {
  const wide = 560, high = 220, left = 40, top = 14;
  const every = [...found.chains, found.asked];
  const most = [1.05 * Math.max(...every.map((one) => one.num_draft)),
    1.05 * Math.max(...every.map((one) => one.speedup))];
  const x = (value) => left + (wide * value) / most[0];
  const y = (value) => top + high * (1 - value / most[1]);
  const text = (a, b, words, anchor) =>
    `<text x="${a}" y="${b}" fill="currentColor" text-anchor="${anchor}">${words}</text>`;
  const lines = [];
  for (let i = 0; i <= 5; i++) {
    const at = (most[1] * i) / 5;
    lines.push(`<path d="M${left} ${y(at)}h${wide}" stroke="currentColor" stroke-opacity=".2"/>`);
    lines.push(text(left - 6, y(at) + 4, at.toFixed(1), "end"));
  }
  for (const one of found.chains) {
    lines.push(text(x(one.num_draft), top + high + 16, one.num_draft, "middle"));
  }
  const points = found.chains.map((one) => `${x(one.num_draft)},${y(one.speedup)}`).join(" ");
  lines.push(`<polyline points="${points}" fill="none" stroke="#4c6fbf" stroke-width="2"/>`);
  for (const [one, fill, size] of [[found.best, "#4c6fbf", 4], [found.asked, "none", 7]]) {
    lines.push(`<circle cx="${x(one.num_draft)}" cy="${y(one.speedup)}" r="${size}" `
      + `fill="${fill}" stroke="#4c6fbf" stroke-width="2"/>`);
  }
  const label = "speed-up of the rounds (× plain) against drafted tokens a round";
  return `<svg viewBox="0 0 ${left + wide + 10} ${top + high + 44}" font-size="12" role="img">`
    + `<title>${label}</title>${lines.join("")}${text(left + wide / 2, top + high + 36, label,
      "middle")}</svg>`;
}

function show(form, place) {
  try {
    const found = calculate(fieldsOf(form));
    const { asked, best, plain } = found;
    const advice = best === plain ? "no chain is faster than plain decoding"
      : `the best chain has ${best.num_draft}: ${best.speedup.toFixed(2)} × plain`;
    place.innerHTML = `<p><strong>${asked.tokens.toFixed(2)} tokens a round, `
      + `${asked.speedup.toFixed(2)} × plain</strong>; ${advice}</p>`
      + drawingOf(found) + tableOf(found);
  } catch (error) {
    place.textContent = error.message;
  }
}

if (typeof module !== "undefined") {
  module.exports = { calculate, fieldsOf, tableOf, drawingOf, show };
} else {
  const form = document.getElementById("calculator");
  const place = document.getElementById("calculated");
  form.addEventListener("input", () => show(form, place));
  show(form, place);
}
