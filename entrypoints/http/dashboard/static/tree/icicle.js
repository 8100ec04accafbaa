// The tree as nested intervals: a span is as wide as all tokens in it and below it, its children lie under it from the
// left, the largest first. What its children leave free on the right are its own tokens. (An icicle plot, after Kruskal
// and Landwehr, "Icicle plots: better displays for hierarchical clustering", 1983.)

const FIELDS = [
  "id",
  "parent",
  "start",
  "tokens",
  "subtree",
  "nodes",
  "tier",
  "flags",
  "idle",
  "uses",
  "namespace",
  "text",
];

export class Icicle {
  /** snapshot: a tree event; namespace: the one to show, or "*". */
  constructor(snapshot, namespace) {
    this.snapshot = snapshot;
    this.root = made({ key: "root", kind: "root", start: 0, tokens: 0, nodes: 1, depth: 0 }, null);
    this.byKey = new Map([["root", this.root]]);
    this.namespaces = [];
    this.#build(namespace);
    this.rows = [];
    this.#place();
  }

  #build(wanted) {
    const spans = snapshotSpans(this.snapshot);
    const names = new Set(spans.filter((span) => span.parent < 0).map((span) => span.namespace ?? ""));
    this.namespaces = [...names].sort();
    const heads = new Map();
    const nodes = [];
    for (const span of spans) {
      let parent = null;
      if (span.parent >= 0) parent = nodes[span.parent] ?? null;
      else if (wanted === "*" || (span.namespace ?? "") === wanted) {
        parent = wanted === "*" ? this.#head(heads, span.namespace ?? "") : this.root;
      }
      const key = String(span.id);
      if (parent === null || this.byKey.has(key)) {
        nodes.push(null);
        continue;
      }
      const node = made({ ...span, key, kind: span.nodes > 1 ? "collapsed" : "span" }, parent);
      node.namespace ??= parent.namespace;
      this.byKey.set(key, node);
      nodes.push(node);
    }
    for (const head of [this.root, ...heads.values()].reverse()) {
      head.subtree = head.children.reduce((sum, child) => sum + child.subtree, 0);
    }
    this.root.children.sort((one, other) => other.subtree - one.subtree);
  }

  /** Where several namespaces are shown, each has a row above its spans. */
  #head(heads, name) {
    if (this.namespaces.length < 2) return this.root;
    let head = heads.get(name);
    if (head === undefined) {
      head = made({ key: `ns:${name}`, kind: "namespace", namespace: name, start: 0, tokens: 0, nodes: 1 }, this.root);
      heads.set(name, head);
      this.byKey.set(head.key, head);
    }
    return head;
  }

  /** Left edge and width of each, as shares of the whole. */
  #place() {
    this.root.left = 0;
    this.root.share = 1;
    const open = [this.root];
    while (open.length) {
      const node = open.pop();
      (this.rows[node.depth] ??= []).push(node);
      const below = node.children.reduce((sum, child) => sum + child.subtree, 0);
      // A snapshot of a tree that was changing may have children larger than their parent: they share its width.
      const whole = Math.max(node.subtree, below, 1);
      let left = node.left;
      node.children.forEach((child, index) => {
        child.left = left;
        child.share = (node.share * child.subtree) / whole;
        child.place = index;
        left += child.share;
        open.push(child);
      });
    }
    for (const row of this.rows) row.sort((one, other) => one.left - other.left);
  }

  get(key) {
    return this.byKey.get(key);
  }

  /** The node that lies at ``share`` of the width in a row, among those at least ``least`` wide; or undefined. */
  at(row, share, least) {
    return this.rows[row]?.find((node) => share >= node.left && share < node.left + Math.max(node.share, least));
  }
}

function snapshotSpans(snapshot) {
  return snapshot.spans.map((values) => Object.fromEntries(FIELDS.map((name, index) => [name, values[index]])));
}

function made(fields, parent) {
  const node = { tier: "device", flags: "", idle: null, uses: 0, namespace: null, text: null, ...fields };
  node.parent = parent;
  node.children = [];
  node.depth = parent === null ? 0 : parent.depth + 1;
  node.place = 0;
  if (parent !== null) parent.children.push(node);
  return node;
}

/** The node and all above it, from the root down. */
export function pathTo(node) {
  const path = [];
  for (let at = node; at !== null; at = at.parent) path.unshift(at);
  return path;
}

/** How warm it is: 0 (used within ten seconds), 1 (a minute), 2 (ten minutes), 3. */
export function heat(idle) {
  if (idle === null || idle < 10) return 0;
  if (idle < 60) return 1;
  return idle < 600 ? 2 : 3;
}
