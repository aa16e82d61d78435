// ---------------------------------------------------------------- rounds

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function summary(round) {
  const counts = {};
  round.status.forEach((status) => (counts[status] = (counts[status] || 0) + 1));
  const proposed = (counts.accepted || 0) + (counts.cut || 0) + (counts.rejected || 0) + (counts.beyond || 0);
  const parts = [];
  if (counts.empty || !round.path.length) parts.push("An empty round: no token was judged and none emitted.");
  else if (!proposed) parts.push("Nothing was proposed.");
  else parts.push(`Accepted ${counts.accepted || 0} of ${plural(proposed, "drafted token")}.`);
  if (counts.cut) parts.push(`${counts.cut} more accepted, but the text ends before ${counts.cut === 1 ? "it" : "them"}.`);
  if (round.kind !== "none") {
    const word = plainly(label(round.last));
    const emitted = round.emitted.length > round.drafted.filter(Boolean).length;
    parts.push(`The target’s own token: ${word} (${round.kind})${emitted ? "." : ", after the end of the text."}`);
  }
  if (counts.passenger) parts.push(`${plural(counts.passenger, "passenger")}.`);
  if (counts["left out"]) parts.push(`${plural(counts["left out"], "node")} left out of this pass.`);
  parts.push(`${plural(round.emitted.length, "new token")}.`);
  if (round.reason) parts.push(`The text ends here: ${round.reason}.`);
  return parts.join(" ");
}

function show(index) {
  if (!rounds.length) return;
  view.round = Math.max(0, Math.min(rounds.length - 1, index));
  const round = rounds[view.round];
  view.node = round.path.length ? round.path.at(-1) : 0; // where the walk ended
  byId("slider").value = view.round + 1;
  const where = view.round ? `Round ${view.round} of ${rounds.length - 1}` : "The end of the prompt";
  byId("slider").setAttribute("aria-valuetext", where);
  byId("where").textContent = where;
  const tokens = rounds.slice(0, view.round + 1).reduce((sum, one) => sum + one.emitted.length, 0);
  byId("tau").textContent = `${plural(tokens, "token")}, τ ${(view.round ? (tokens - 1) / view.round : 1).toFixed(2)} so far`;
  for (const id of ["first", "previous"]) byId(id).disabled = view.round === 0;
  for (const id of ["next", "last"]) byId(id).disabled = view.round === rounds.length - 1;
  [...byId("bars").children].forEach((bar, at) => bar.classList.toggle("here", at === view.round));
  byId("summary").textContent = summary(round);
  drawTree(round);
  select(view.node, false);
  drawText();
  history.replaceState(null, "", `#${view.round + 1}`);
}

function select(node, focus) {
  view.node = node;
  for (const item of byId("canvas").querySelectorAll("g.item")) {
    const chosen = Number(item.dataset.node) === node;
    item.classList.toggle("chosen", chosen);
    item.setAttribute("aria-selected", chosen);
    item.setAttribute("tabindex", chosen ? "0" : "-1");
    if (chosen && focus) item.focus({ preventScroll: true });
    if (chosen) bringIntoView(item);
  }
  drawNode(rounds[view.round]);
}

function bringIntoView(item) {
  const canvas = byId("canvas"), outer = canvas.getBoundingClientRect();
  const inner = item.getBoundingClientRect(), margin = 24;
  if (inner.left < outer.left + margin) canvas.scrollLeft -= outer.left + margin - inner.left;
  if (inner.right > outer.right - margin) canvas.scrollLeft += inner.right - outer.right + margin;
  if (inner.top < outer.top + margin) canvas.scrollTop -= outer.top + margin - inner.top;
  if (inner.bottom > outer.bottom - margin) canvas.scrollTop += inner.bottom - outer.bottom + margin;
}

function redraw() {
  if (!rounds.length) return;
  const node = view.node;
  drawTree(rounds[view.round]);
  select(node, false);
}

function zoom(change) {
  const sizes = [0.5, 0.65, 0.8, 1, 1.25, 1.5];
  const at = sizes.indexOf(typeof view.zoom === "number" ? view.zoom : 1) + change;
  view.zoom = change ? sizes[Math.max(0, Math.min(sizes.length - 1, at))] : "fit";
  redraw();
}

function turn() {
  view.outline = !(view.outline ?? byId("canvas").clientWidth < 620);
  redraw();
}

// ---------------------------------------------------------------- the page

function drawHeader() {
  byId("model").textContent = trace.model;
  const facts = [["drafter", trace.drafter]];
  if (trace.rule) facts.push(["rule", trace.rule + (trace.lossless ? " (lossless)" : "")]);
  for (const [name, value] of Object.entries(trace.settings)) facts.push([name.replaceAll("_", " "), value]);
  facts.push(["rounds", String(Math.max(rounds.length - 1, 0))], ["tokens", String(rounds.reduce((sum, one) => sum + one.emitted.length, 0))]);
  for (const [name, value] of facts) {
    byId("facts").append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  }
  if (trace.source !== null) {
    byId("facts").append(make("div", {}, make("dt", {}, "encoder input"), make("dd", {}, plainly(visible(trace.source, true)))));
  }
  const warnings = [];
  if (trace.approximate) warnings.push(`Approximate: ${trace.approximate}. The text does not follow the model’s own law.`);
  if (trace.drafter.includes("synthetic")) warnings.push("Synthetic acceptance: the drafter was told the target’s text.");
  byId("warning").textContent = warnings.join(" ");
  byId("warning").hidden = !warnings.length;
  const ended = rounds.length ? rounds.at(-1).reason : "";
  if (trace.interrupted) byId("note").textContent = "The trace was interrupted.";
  else if (!ended) byId("note").textContent = "The trace ends here; the text would go on. Pass a greater --rounds to trace more rounds.";
}

function drawBars() {
  const most = Math.max(1, ...rounds.map((one) => one.emitted.length));
  const width = `clamp(1px, calc((100% - 18px) / ${Math.max(1, rounds.length)} * .72), 16px)`;
  rounds.forEach((one, index) => {
    const share = rounds.length === 1 ? 0.5 : index / (rounds.length - 1);
    const bar = make("div", { class: "bar" });
    bar.style.left = `calc(9px + (100% - 18px) * ${share})`;
    bar.style.width = width;
    const drafted = one.drafted.filter(Boolean).length, own = one.emitted.length - drafted;
    for (const [name, count] of [["own", own], ["kept", drafted]]) {
      if (!count) continue;
      const block = make("i", { class: name });
      block.style.height = `${(count / most) * 100}%`;
      bar.append(block);
    }
    if (!one.emitted.length) bar.append(make("i", { class: "none" }));
    byId("bars").append(bar);
  });
}

function drawLegend() {
  const used = new Set(rounds.flatMap((one) => one.status));
  if (rounds.some((one) => one.kind !== "none")) used.add("last");
  for (const status of Object.keys(NAME)) {
    if (!used.has(status) || status === "root") continue;
    byId("legend").append(make("li", {}, make("i", { class: `c-${css(status)}` }, MARK[status]), NAME[status]));
  }
  const laws = [["--p", "p, the target’s probability"]];
  if (rounds.some((one) => one.q.some((q) => q !== null))) laws.push(["--q", "q, the drafter’s probability"]);
  for (const [colour, name] of laws) {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = `var(${colour})`;
    byId("legend").append(make("li", {}, swatch, name));
  }
  const ranked = (one) => one.parent.some((above, n) => one.q[n] === null && one.parent.indexOf(above) !== n);
  if (rounds.some(ranked)) byId("legend").append(make("li", {}, "#2: the drafter’s second choice below the same parent"));
}

function drawTerms() {
  for (const [term, meaning] of TERMS) byId("terms").append(make("dt", {}, term), make("dd", {}, meaning));
}

/** As high as the whole text needs, up to some lines: so the page stands still from round to round. */
function sizeText() {
  const panel = byId("text"), shown = view.round;
  view.round = rounds.length - 1;
  drawText();
  panel.style.height = `${Math.min(panel.scrollHeight, 6 * 23)}px`;
  view.round = shown;
}

function key(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const slider = event.target === byId("slider");
  const reading = event.target.closest?.(".text");
  const along = { ArrowLeft: view.round - 1, ArrowRight: view.round + 1, Home: 0, End: rounds.length - 1 };
  if (event.key in along && !slider && !(reading && event.key !== "ArrowLeft" && event.key !== "ArrowRight")) {
    show(along[event.key]);
  } else if ((event.key === "ArrowUp" || event.key === "ArrowDown") && !reading) {
    const at = view.order.indexOf(view.node) + (event.key === "ArrowUp" ? -1 : 1);
    if (at >= 0 && at < view.order.length) select(view.order[at], true);
  } else if (event.key === "+" || event.key === "=") zoom(1);
  else if (event.key === "-") zoom(-1);
  else if (event.key === "0") zoom(0);
  else if (event.key === "o") turn();
  else return;
  event.preventDefault();
}

function startPage() {
  drawHeader();
  if (!rounds.length) {
    byId("summary").textContent = "No round was run.";
    document.querySelector("nav").hidden = true;
    drawText();
    return;
  }
  drawBars();
  drawLegend();
  drawTerms();
  sizeText();
  byId("slider").max = rounds.length;
  byId("slider").addEventListener("input", (event) => show(Number(event.target.value) - 1));
  byId("first").addEventListener("click", () => show(0));
  byId("previous").addEventListener("click", () => show(view.round - 1));
  byId("next").addEventListener("click", () => show(view.round + 1));
  byId("last").addEventListener("click", () => show(rounds.length - 1));
  byId("smaller").addEventListener("click", () => zoom(-1));
  byId("larger").addEventListener("click", () => zoom(1));
  byId("fit").addEventListener("click", () => zoom(0));
  byId("shape").addEventListener("click", turn);
  byId("bars").addEventListener("click", (event) => {
    const box = byId("bars").getBoundingClientRect();
    const share = (event.clientX - box.left - 9) / Math.max(1, box.width - 18);
    show(Math.round(share * (rounds.length - 1)));
  });
  byId("canvas").addEventListener("click", (event) => {
    const item = event.target.closest("g.item");
    if (item) select(Number(item.dataset.node), true);
  });
  document.addEventListener("keydown", key);
  window.addEventListener("hashchange", () => show((Number.parseInt(location.hash.slice(1), 10) || 1) - 1));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) redraw();
    width = window.innerWidth;
  });
  // as high as the highest tree, within limits, so that the page stands still from round to round
  const heights = rounds.map((one) => lay(one, byId("canvas").clientWidth < 620).h);
  byId("canvas").style.minHeight = `min(${Math.max(...heights) + 24}px, var(--room))`;
  show((Number.parseInt(location.hash.slice(1), 10) || 1) - 1);
}

startPage();
