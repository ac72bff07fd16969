// Runs beside the chosen one: whose losses are drawn too, and in which keys their specs differ.

import { $, el, show } from "./dom.js";

export const MOST = 7;
let asked = "";

// The address keeps them: #RUN,OTHER,OTHER. A run that is gone is left out.
export function fromAddress(hash) {
  const [chosen = "", ...others] = hash.slice(1).split(",").map(decoded);
  return { chosen, others: new Set(others.filter((name) => name && name !== chosen).slice(0, MOST)) };
}

export const toAddress = (chosen, others) => [chosen, ...others].map(encodeURIComponent).join(",");

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

// One switch for each other run that has losses, in the colour of its curve.
export function drawSwitches(runs, run, others, toggle) {
  const offered = runs.filter((item) => item !== run && (item.losses.length || others.has(item.run_id)));
  $("compare").hidden = !offered.length;
  const colour = new Map(compared(runs, run, others).map((item, i) => [item.run_id, `s${i}`]));
  show("compare", "beside: ", ...offered.map((item) => el("button", {
    type: "button", "aria-pressed": String(others.has(item.run_id)), disabled: !others.has(item.run_id) && others.size >= MOST,
    onclick: () => toggle(item.run_id),
  }, el("i", { class: `swatch ${colour.get(item.run_id) ?? "none"}` }), item.run_id)));
}

export const compared = (runs, run, others) => runs.filter((item) => item !== run && others.has(item.run_id));

// Asked again only when the choice changes: a spec never does.
export async function drawDifferences(names) {
  const wanted = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
  if (wanted === asked) return;
  asked = wanted;
  $("differences-panel").hidden = names.length < 2;
  if (names.length < 2) return;
  let found = null;
  try {
    const answer = await fetch(`/api/differences?${wanted}`, { cache: "no-store", signal: AbortSignal.timeout(8000) });
    if (answer.ok) found = await answer.json();
  } catch { /* asked again below */ }
  if (wanted !== asked) return; // another choice was made meanwhile
  if (!found) asked = ""; // at the next refresh
  $("differences-note").textContent = !found ? "the coordinator did not answer" : `${found.differences.length || "no"} keys of the specs`;
  show("differences", ...(found && found.differences.length ? table(names, found.differences) : []));
}

function table(names, rows) {
  return [
    el("thead", {}, el("tr", {}, el("th", {}, "key"), ...names.map((name) => el("th", {}, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, el("td", {}, el("code", {}, row.key)),
      ...row.values.map((value) => el("td", { class: "value" }, value === null ? "–" : JSON.stringify(value)))))),
  ];
}
