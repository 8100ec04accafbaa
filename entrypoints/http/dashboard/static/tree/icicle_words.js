// Texts about a span: on it, in the tooltip, and for screen readers.

import { count, duration, exact, percent, plural, shortened, tokens, visible } from "../drawing/format.js";

const MARKS = [
  ["L", "locked"],
  ["S", "leased"],
  ["I", "being loaded"],
  ["O", "being stored"],
  ["R", "evicted first when memory is needed"],
  ["T", "with a recurrent state"],
];
const TIERS = { device: "on the device", host: "on the host", mixed: "on several tiers" };

export function marksOf(node) {
  return MARKS.filter(([letter]) => node.flags.includes(letter)).map(([, words]) => words);
}

export function tierOf(node) {
  return TIERS[node.tier] ?? visible(node.tier);
}

export function namespaceName(name) {
  return name === "" || name === null ? "default namespace" : visible(name);
}

/** For its rectangle: [text that must fit in whole, text that may be cut]. */
export function labelOf(node) {
  if (node.kind === "root") return ["", tokens(node.subtree)];
  if (node.kind === "namespace") return ["", `${shortened(namespaceName(node.namespace), 60)} · ${count(node.subtree)}`];
  if (node.kind === "collapsed") return [`${count(node.nodes)} more`, ""];
  const signs = { I: "↓ ", O: "↑ ", T: "◆ " };
  const marks = Object.entries(signs).map(([letter, sign]) => (node.flags.includes(letter) ? sign : "")).join("");
  return [`${marks}${count(node.tokens)}`, node.text === null ? "" : visible(shortened(node.text, 200))];
}

/** Its name in the breadcrumbs. */
export function crumbOf(node) {
  if (node.kind === "root") return "all";
  if (node.kind === "namespace") return shortened(namespaceName(node.namespace), 24);
  return node.kind === "collapsed" ? `${count(node.nodes)} more` : `${count(node.start)}–${count(node.start + node.tokens)}`;
}

/** The full description, for screen readers. */
export function spokenOf(node) {
  if (node.kind === "root") return `The whole cache, ${tokens(node.subtree)}, ${plural(node.children.length, "child", "children")}`;
  if (node.kind === "namespace") {
    return `${shortened(namespaceName(node.namespace), 60)}, ${tokens(node.subtree)}, ${plural(node.children.length, "child", "children")}`;
  }
  const what =
    node.kind === "collapsed"
      ? [`${count(node.nodes)} more siblings, too small to show`, tokens(node.subtree)]
      : [`Tokens ${exact(node.start)} to ${exact(node.start + node.tokens)}`, `${tokens(node.subtree)} including all below`];
  const below = node.children.length ? [plural(node.children.length, "child", "children")] : [];
  const text = node.text ? [visible(shortened(node.text, 80))] : [];
  return [...what, tierOf(node), ...marksOf(node), ...below, ...text].join(", ");
}

/** [[name, value], …] for the tooltip. */
export function factsOf(node, whole) {
  const share = whole > 0 ? ` (${percent(node.subtree / whole)})` : "";
  const facts = [];
  if (node.kind === "span") {
    facts.push(["Tokens", `${exact(node.tokens)}, from ${exact(node.start)} to ${exact(node.start + node.tokens)}`]);
    facts.push(["Including all below", `${exact(node.subtree)}${share}`]);
  } else {
    if (node.kind === "collapsed") facts.push(["Siblings", `${exact(node.nodes)}, each too small to show`]);
    facts.push(["Tokens", `${exact(node.subtree)}${share}`]);
  }
  if (node.kind === "span" || node.kind === "collapsed") {
    const marks = marksOf(node);
    facts.push(["State", [tierOf(node), ...marks].join(", ")]);
    if (node.idle !== null) facts.push(["Used", `${plural(node.uses, "time")}, last ${duration(node.idle)} ago`]);
  }
  if (node.namespace !== null && node.kind !== "root") facts.push(["Namespace", namespaceName(node.namespace)]);
  return facts;
}
