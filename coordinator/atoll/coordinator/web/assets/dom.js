// Small helpers: elements without markup strings, and numbers as people read them.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  return fill(node, attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  return fill(node, attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null).map((child) => child ?? ""));
  return node;
}

export const $ = (id) => document.getElementById(id);

export function show(id, ...children) {
  $(id).replaceChildren(...children);
}

export function count(value) {
  if (!value) return "–";
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (value >= size) return (value / size).toPrecision(3) + unit;
  }
  return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
}

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return (value / 2 ** (10 * power)).toPrecision(3) + " " + units[power];
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

export const clock = (unixMs) => new Date(unixMs).toLocaleTimeString([], { hour12: false });
