// The charts, drawn as SVG by hand: a loss curve over tokens, a strip of the latest rounds, and who holds which layers.

import { count, duration, el, svg } from "./dom.js";

const PAD = { left: 44, right: 14, top: 8, bottom: 24 };

// `sources`: names of the parts of a loss that get a curve of their own, in the order of their colours. `beside`: other
// runs, whose losses are drawn over the same tokens.
export function lossChart(box, losses, sources, beside = []) {
  if (losses.length < 2) {
    box.replaceChildren(el("div", { class: "empty" }, "The curve begins with the second evaluated round."));
    return;
  }
  const { width, height } = size(box);
  const xs = losses.map((item) => item.committed_tokens);
  const ys = losses.map((item) => item.loss);
  const others = beside.map((run) => run.losses.map((item) => [item.committed_tokens, item.loss]));
  const reach = [...xs, ...others.flat().map((point) => point[0])];
  const [from, to] = [Math.min(...reach), Math.max(...reach)];
  const x = scale(from, to, PAD.left, width - PAD.right);
  const parts = sources.map((name) => losses.filter((item) => item.sources && Object.hasOwn(item.sources, name))
    .map((item) => [item.committed_tokens, item.sources[name]]));
  // One node can report any loss: what is far above the held-out losses must not set the scale.
  const trained = losses.filter((item) => item.train_loss && item.train_loss < 2 * Math.max(...ys)).map((item) => [item.committed_tokens, item.train_loss]);
  const all = [...ys, ...[...parts, ...others, trained].flat().map((point) => point[1])];
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  const y = scale(low - room, high + room, height - PAD.bottom, PAD.top);
  const path = (values) => values.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" ");
  const points = losses.map((item) => [x(item.committed_tokens), y(item.loss)]);
  const line = points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" ");
  const floor = height - PAD.bottom;
  const [lastX, lastY] = points[points.length - 1];
  const drawing = svg("svg", { role: "img", "aria-label": `validation loss, now ${ys[ys.length - 1].toFixed(4)}` },
    ...ticks(low - room, high + room, 5).map((value) => rule(value, y(value), width)),
    ...ticks(from, to, 6).map((value) =>
      svg("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, short(value))),
    svg("polygon", { class: "area", points: `${points[0][0]},${floor} ${line} ${lastX},${floor}` }),
    ...[...parts, ...others].map((part, i) => svg("polyline", { class: `curve source s${i}`, points: path(part) })),
    svg("polyline", { class: "curve train", points: path(trained) }),
    svg("polyline", { class: "curve", points: line }),
    svg("circle", { class: "dot", cx: lastX, cy: lastY, r: 4.5 }));
  const hover = svg("g");
  const tip = el("div", { class: "tip", hidden: "" });
  drawing.append(hover);
  drawing.addEventListener("pointermove", (event) => {
    const at = event.clientX - box.getBoundingClientRect().left;
    const nearest = points.reduce((best, point, i) => Math.abs(point[0] - at) < Math.abs(points[best][0] - at) ? i : best, 0);
    const [px, py] = points[nearest];
    hover.replaceChildren(
      svg("line", { class: "cross", x1: px, x2: px, y1: PAD.top, y2: floor }),
      svg("circle", { class: "dot", cx: px, cy: py, r: 4.5 }));
    tip.hidden = false;
    const found = losses[nearest].sources ?? {};
    const told = sources.filter((name) => Object.hasOwn(found, name)).map((name) => `; ${name} ${found[name].toFixed(4)}`).join("");
    const { train_loss: train, tokens_per_second: pace } = losses[nearest];
    const measured = `${train ? `; training ${train.toFixed(4)}` : ""}${pace ? `; ${count(pace)} tokens/s` : ""}`;
    const there = beside.map((run) => [run.run_id, lossAt(run.losses, xs[nearest])]).filter(([, loss]) => loss !== null)
      .map(([name, loss]) => `; ${name} ${loss.toFixed(4)}`).join("");
    tip.textContent = `${ys[nearest].toFixed(4)} after round ${losses[nearest].round}, ${count(xs[nearest])} tokens${measured}${told}${there}`;
    tip.style.left = `${Math.min(Math.max(px, 110), width - 110)}px`;
    tip.style.top = `${Math.max(py, 40)}px`;
  });
  drawing.addEventListener("pointerleave", () => { hover.replaceChildren(); tip.hidden = true; });
  box.replaceChildren(drawing, tip);
}

// A run's loss at a number of tokens, on the line between two evaluated rounds; null where it has none.
function lossAt(losses, tokens) {
  const after = losses.findIndex((item) => item.committed_tokens >= tokens);
  if (after < 0) return null;
  const [a, b] = [losses[after - 1], losses[after]];
  if (b.committed_tokens === tokens) return b.loss;
  return a ? a.loss + ((tokens - a.committed_tokens) / (b.committed_tokens - a.committed_tokens)) * (b.loss - a.loss) : null;
}

export function roundsChart(box, rounds) {
  if (!rounds.length) {
    box.replaceChildren(el("div", { class: "empty" }, "No round has been reported yet."));
    return;
  }
  const { width, height } = size(box);
  const floor = height - PAD.bottom;
  const most = Math.max(...rounds.map((item) => item.seconds), 0.1);
  const y = scale(0, most * 1.08, floor, PAD.top);
  const step = Math.min(26, (width - PAD.left - PAD.right) / rounds.length);
  const bars = rounds.map((item, i) => svg("rect", {
    class: `bar ${item.committed ? "good" : "bad"}`,
    x: PAD.left + i * step + step * 0.14, width: step * 0.72, rx: Math.min(2.5, step / 5),
    y: Math.min(y(item.seconds), floor - 2), height: Math.max(2, floor - y(item.seconds)),
  }, svg("title", {}, story(item))));
  const every = Math.max(1, Math.ceil(rounds.length / Math.max(1, Math.floor((width - PAD.left) / 60))));
  const names = rounds.map((item, i) => (i % every ? null : svg("text",
    { x: PAD.left + (i + 0.5) * step, y: height - 6, "text-anchor": "middle" }, String(item.number))));
  box.replaceChildren(svg("svg", { role: "img", "aria-label": "latest rounds" },
    ...ticks(0, most * 1.08, 4).map((value) => rule(value, y(value), width, " s")), ...bars, ...names));
}

const ROUTE = { left: 84, top: 18, height: 40, gap: 8, letter: 6.6 };

export function planChart(box, plan, nodes) {
  const rows = [...plan.routes.map((route, i) => [`route ${i + 1}`, route]), ...lanes(plan.standbys).map((lane) => ["stand by", lane])];
  const height = ROUTE.top + rows.length * (ROUTE.height + ROUTE.gap);
  box.style.minHeight = `${height}px`;
  const width = Math.max(box.clientWidth, 240);
  const x = scale(0, plan.layers, ROUTE.left, width - PAD.right);
  const every = Math.ceil(plan.layers / Math.max(1, Math.floor((width - ROUTE.left) / 48)));
  const marks = [];
  for (let layer = 0; layer < plan.layers; layer += every) {
    marks.push(svg("line", { class: "grid", x1: x(layer), x2: x(layer), y1: ROUTE.top - 4, y2: height }),
      svg("text", { x: x(layer) + 2, y: ROUTE.top - 6 }, String(layer)));
  }
  const drawn = rows.map(([name, stages], i) => {
    const top = ROUTE.top + i * (ROUTE.height + ROUTE.gap);
    return svg("g", {}, svg("text", { x: 0, y: top + ROUTE.height / 2 + 4 }, name), ...stages.map((stage) => boxOf(stage, nodes, x, top)));
  });
  box.replaceChildren(svg("svg", { role: "img", "aria-label": "who holds which layers" }, ...marks, ...drawn));
}

function boxOf(stage, nodes, x, top) {
  const node = nodes.get(stage.peer_id);
  const left = x(stage.first);
  const right = Math.max(left + 1, x(stage.last + 1) - 3);
  const span = stage.first === stage.last ? `${stage.first}` : `${stage.first}–${stage.last}`;
  const name = node ? node.name : `…${stage.peer_id.slice(-6)}`;
  const fits = (text) => (text.length * ROUTE.letter < right - left - 10 ? text : "");
  return svg("g", { class: `stage ${node && node.connected ? "good" : "bad"}` },
    svg("rect", { x: left, y: top, width: right - left, height: ROUTE.height, rx: 5 }),
    svg("text", { class: "name", x: left + 8, y: top + 17 }, fits(name) || fits(`${name.slice(0, Math.max(1, Math.floor((right - left - 10) / ROUTE.letter) - 1))}…`)),
    svg("text", { x: left + 8, y: top + 32 }, fits(span)),
    svg("title", {}, `${name}: layers ${span}${node ? `, ${node.connected ? node.detail || node.state : "offline"}` : ""}`));
}

// Standbys side by side where their layers do not overlap.
function lanes(standbys) {
  const made = [];
  for (const stage of [...standbys].sort((a, b) => a.first - b.first)) {
    const free = made.find((lane) => lane[lane.length - 1].last < stage.first);
    if (free) free.push(stage);
    else made.push([stage]);
  }
  return made;
}

function story(item) {
  const end = item.committed
    ? `committed by ${item.members} nodes, ${count(item.tokens)} tokens${notes(item)}`
    : `abandoned: ${item.reason}`;
  return `round ${item.number}, ${duration(item.seconds)}: ${end}`;
}

function size(box) {
  return { width: Math.max(box.clientWidth, 240), height: Math.max(box.clientHeight, 120) };
}

function scale(from, to, start, end) {
  const span = to - from || 1;
  return (value) => start + ((value - from) / span) * (end - start);
}

function rule(value, y, width, unit = "") {
  return svg("g", {},
    svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }),
    svg("text", { x: PAD.left - 8, y: y + 4, "text-anchor": "end" }, plain(value) + unit));
}

const plain = (value) => String(Number(value.toPrecision(6)));
const short = (value) => (value ? count(value).replace(/\.?0+(?= |$)/, (zeros) => (zeros.startsWith(".") ? "" : zeros)) : "0");

// Round numbers between two ends: 1, 2 or 5 times a power of ten apart.
function ticks(from, to, wanted) {
  const raw = (to - from) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const values = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) values.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return values;
}

function notes(item) {
  const told = [
    item.void ? "void: the run was recovered from before it" : "",
    item.present < item.members ? `${item.members - item.present} gone by then` : "",
    item.partial ? `${item.partial} only in part` : "",
    item.parts_zeroed ? `${item.parts_zeroed} parts zeroed` : "",
  ].filter(Boolean);
  return told.map((note) => `; ${note}`).join("");
}
