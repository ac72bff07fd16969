// The status page: asks for /api/status every two seconds and draws what it says. Only reads.

import { lossChart, planChart, roundsChart } from "./charts.js";
import { compared, drawDifferences, drawSwitches, fromAddress, toAddress } from "./compare.js";
import { $, bytes, clock, count, duration, el, show } from "./dom.js";

const REFRESH_MS = 2000;
const GOOD = new Set(["training", "ready", "finished"]);
const WARN = new Set(["joining", "catching up", "paused", "draining"]);
let { chosen, others } = fromAddress(location.hash);
let latest = null;

async function refresh() {
  try {
    const answer = await fetch("/api/status", { cache: "no-store", signal: AbortSignal.timeout(8000) });
    if (!answer.ok) throw new Error(String(answer.status));
    latest = await answer.json();
    live("on", `live · ${clock(latest.unix_ms)}`);
    draw();
  } catch {
    live("lost", "the coordinator does not answer; members train on without it");
  }
  setTimeout(refresh, REFRESH_MS);
}

function live(kind, text) {
  $("live").className = `live ${kind}`;
  $("live").textContent = text;
}

function draw() {
  const runs = latest.runs;
  const run = runs.find((item) => item.run_id === chosen) ?? runs[runs.length - 1];
  show("runs", ...runs.map((item) => el("button",
    { "aria-current": item === run, onclick: () => choose(item.run_id, []) }, item.run_id)));
  $("footer").textContent = `atoll ${latest.atoll_version} · this page reads only; steer with atollctl · `;
  $("footer").append(el("a", { href: "/api/status" }, "JSON"), " · ", el("a", { href: "/metrics" }, "metrics"));
  drawEvents(latest.events.filter((event) => !run || !event.run_id || event.run_id === run.run_id));
  document.body.classList.toggle("no-run", !run);
  if (!run) {
    show("cards", el("div", { class: "card" }, el("strong", {}, "No run yet"), el("span", {}, "Create one: atollctl run create FILE --start")));
    return;
  }
  const nodes = latest.nodes.filter((node) => node.run_id === run.run_id);
  $("state").textContent = run.state;
  $("state").className = `pill ${run.state}`;
  document.title = run.validation_loss ? `${run.validation_loss.toFixed(3)} · ${run.run_id} · Atoll` : `${run.run_id} · Atoll`;
  drawCards(run, nodes);
  $("loss-note").textContent = run.losses.length ? "nats per token, over committed tokens" : "";
  const beside = compared(runs, run, others);
  const sources = beside.length ? [] : run.sources; // one set of colours at a time
  drawSources(sources);
  lossChart($("loss"), run.losses, curves(sources), beside);
  drawSwitches(runs, run, others, (name) => choose(run.run_id, others.has(name) ? [...others].filter((it) => it !== name) : [...others, name]));
  drawDifferences([run, ...beside].map((item) => item.run_id));
  $("rounds-note").textContent = run.rounds.length ? `the latest ${run.rounds.length}` : "";
  roundsChart($("rounds"), run.rounds);
  drawPlan(run.plan, nodes);
  drawNodes(nodes);
  drawContributors(run.contributors);
}

function choose(name, beside) {
  chosen = name;
  others = new Set(beside);
  location.hash = toAddress(chosen, others);
  draw();
}

const SOURCE_CURVES = 8;
const curves = (sources) => [...sources].sort((a, b) => b.windows - a.windows).slice(0, SOURCE_CURVES).map((source) => source.name);

// A legend of the curves by source. Only for a corpus of several.
function drawSources(sources) {
  $("loss-legend").hidden = !sources.length;
  const trained = sources.reduce((sum, source) => sum + source.tokens, 0);
  const told = new Map(sources.map((source) => [source.name, source]));
  const share = (source) => (trained ? ` (${percent(source.tokens / trained)} of what was trained)` : "");
  show("loss-legend", el("i", { class: "swatch all" }), "all ", ...curves(sources).flatMap((name, i) =>
    [el("i", { class: `swatch s${i}` }), `${name} ${told.get(name).loss.toFixed(4)}${share(told.get(name))} `]),
  sources.length > SOURCE_CURVES ? `and ${sources.length - SOURCE_CURVES} more: see JSON` : "");
}

// Only where the model is cut: replicas are all alike.
function drawPlan(plan, nodes) {
  const cut = plan && (plan.standbys.length > 0 || plan.routes.some((route) => route.length > 1));
  $("plan-panel").hidden = !cut;
  if (!cut) return;
  const standing = plan.standbys.length ? `, ${plan.standbys.length} standing by` : "";
  $("plan-note").textContent = `${plan.version}: ${plan.routes.length} ${plan.routes.length === 1 ? "route" : "routes"} over ${plan.layers} layers${standing}`;
  planChart($("plan"), plan, new Map(nodes.map((node) => [node.peer_id, node])));
}

function drawCards(run, nodes) {
  const here = nodes.filter((node) => node.connected);
  const pace = here.reduce((sum, node) => sum + node.tokens_per_second, 0);
  const left = run.eta_unix_ms === null ? "" : ` · ${duration(Math.max(0, run.eta_unix_ms - latest.unix_ms) / 1000)} left`;
  const share = run.committed_tokens / run.stop_tokens;
  const sent = nodes.reduce((sum, node) => sum + node.averaging_bytes_sent, 0);
  const fp32 = nodes.reduce((sum, node) => sum + node.averaging_bytes_fp32, 0);
  const first = run.losses.length ? run.losses[0].loss : 0;
  show("cards",
    card("Tokens", `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`,
      el("progress", { value: run.committed_tokens, max: run.stop_tokens }),
      `${run.committed_tokens ? count(run.committed_tokens) : 0} of ${count(run.stop_tokens)}${left}`),
    card("Validation loss", run.validation_loss ? run.validation_loss.toFixed(4) : "–",
      first && run.losses.length > 1 ? `from ${first.toFixed(3)} · ${(100 * (run.validation_loss / first - 1)).toFixed(0).replace("-", "−")} %` : "after the first round"),
    card("Rounds", String(run.head_round || "–"), abandoned(run)),
    card("Nodes", `${run.nodes_ready}`, `${run.min_nodes} needed · plan ${run.plan_version || "–"}`),
    card("Pace", pace ? [count(pace), el("small", {}, " tok/s")] : "–", run.parameters ? `${count(run.parameters)} parameters` : "parameters known after genesis"),
    card("Sent for averaging", bytes(sent), sent && fp32 ? `${(fp32 / sent).toFixed(1)} × less than fp32` : "nothing yet"));
}

function abandoned(run) {
  const lost = run.rounds_opened - run.rounds_committed;
  return run.rounds_opened ? `${lost || "none"} of ${run.rounds_opened} abandoned` : "none opened yet";
}

function card(title, value, ...below) {
  return el("div", { class: "card" }, el("b", {}, title), el("strong", {}, ...[value].flat()),
    ...below.map((item) => (typeof item === "string" ? el("span", {}, item) : item)));
}

function drawNodes(nodes) {
  const here = nodes.filter((node) => node.connected);
  $("nodes-note").textContent = `${here.length} connected of ${nodes.length}`;
  const fastest = Math.max(...nodes.map((node) => node.tokens_per_second), 1);
  const ordered = [...nodes].sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
  const heads = ["name", "state", "device", ">tokens/s", ">data stall", ">steps", ">tokens", ">round", ">loss", ">sent", ">last seen"];
  show("nodes",
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th",
      { class: head.startsWith(">") ? "right" : null }, head.replace(">", ""))))),
    el("tbody", {}, ...(ordered.length ? ordered.map((node) => row(node, fastest)) : [nobody()])));
}

const nobody = () => el("tr", {}, el("td", { colspan: 11, class: "quiet" }, "Nobody has enrolled yet: atollctl token create, then atoll join"));
const rank = (node) => (node.banned || node.left ? 3 : node.connected ? (node.roles.includes("seed") ? 0 : 1) : 2);

function row(node, fastest) {
  const seed = node.roles.includes("seed");
  const word = node.banned ? "banned" : node.failure && !node.connected ? `failed: ${node.failure}` : node.left ? "left" : !node.connected ? "offline" : seed ? "seed" : node.state;
  const kind = node.banned || word.startsWith("failed") ? "bad" : !node.connected ? "" : seed || GOOD.has(word) ? "good" : WARN.has(word) ? "warn" : "";
  const drains = node.draining && word !== "draining" ? ", to drain" : "";
  const why = node.connected && !seed && node.reason && node.reason !== word ? `: ${node.reason}` : "";
  const right = (text) => el("td", { class: "right" }, text);
  return el("tr", { class: node.connected ? null : "away", title: node.connected ? node.detail : node.ended_detail || node.detail },
    el("td", {}, node.name, el("span", { class: "peer" }, "…" + node.peer_id.slice(-6))),
    el("td", {}, el("span", { class: `dot-state ${kind}` }, word + why + drains)),
    el("td", {}, node.device || "–"),
    el("td", { class: "right" }, seed ? "" : node.connected ? count(node.tokens_per_second) : "–",
      seed ? null : el("meter", { min: 0, max: fastest, value: node.connected ? node.tokens_per_second : 0 })),
    el("td", { class: "right", title: textStory(node) }, seed ? "" : node.connected && node.state === "training" ? percent(node.data_stall_share) : "–"),
    right(seed ? "" : node.steps ? node.steps.toLocaleString("en") : "–"), right(seed ? "" : count(node.tokens)), right(seed ? "" : String(node.head_round || "–")),
    right(node.train_loss ? node.train_loss.toFixed(3) : seed ? "" : "–"), right(seed ? "" : bytes(node.averaging_bytes_sent)),
    right(node.last_seen_unix_ms ? ago(node.last_seen_unix_ms) : "never"));
}

// Which nodes contributed most, as committed rounds count it; also those that left.
function drawContributors({ nodes, tokens, first }) {
  $("contributors-panel").hidden = !first.length;
  const shown = first.filter((item) => item.rank).length;
  $("contributors-note").textContent = shown < nodes ? `the first ${shown} of ${nodes}` : "tokens that count in committed rounds";
  const most = Math.max(...first.map((item) => item.tokens), 1);
  const right = (text) => el("td", { class: "right" }, text);
  show("contributors",
    el("thead", {}, el("tr", {}, ...[">rank", "name", ">tokens", ">share", ">rounds", "first", "last"].map((head) => el("th",
      { class: head.startsWith(">") ? "right" : null }, head.replace(">", ""))))),
    el("tbody", {}, ...first.map((item) => el("tr", {},
      right(item.rank || "–"),
      el("td", {}, item.peer_id ? item.name || "unknown" : "forgotten nodes", item.peer_id ? el("span", { class: "peer" }, "…" + item.peer_id.slice(-6)) : null),
      el("td", { class: "right" }, count(item.tokens), el("meter", { min: 0, max: most, value: item.tokens })),
      right(tokens ? percent(item.tokens / tokens) : "–"), right(item.rounds.toLocaleString("en")),
      el("td", {}, ago(item.first_unix_ms)), el("td", {}, ago(item.last_unix_ms))))));
}

const ago = (unixMs) => `${duration(Math.max(0, (latest.unix_ms - unixMs) / 1000))} ago`;
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const textStory = (node) => (node.data_bytes_fetched
  ? `${bytes(node.data_bytes_fetched)} of training text fetched, ${bytes(node.data_bytes_trained)} trained` : "");

function drawEvents(events) {
  const kind = (name) => (/lost|banned|abandoned|rejected|differs/.test(name) ? "bad" : /committed|finished|training/.test(name) ? "good" : null);
  show("events", ...events.map((event) => el("li", { class: kind(event.kind) },
    el("time", {}, clock(event.unix_ms)), el("code", {}, event.kind), el("span", {}, event.message))));
}

addEventListener("resize", () => latest && draw());
addEventListener("hashchange", () => { ({ chosen, others } = fromAddress(location.hash)); if (latest) draw(); });
refresh();
