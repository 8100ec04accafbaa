// Which requests the timeline shows, in which rows: a child right below the request that it continues.

import { firstMoment, lastMoment, lifeKey } from "../data/store.js";

/**
 * lives: Map from key to life; those that something happened to between ``from`` and ``to`` are shown.
 * Returns [{key, life, depth, parent (a row) or null, children}, …], the newest family first, its members in order.
 */
export function rowsOf(lives, from, to) {
  const rows = [];
  const byRid = new Map();
  for (const [key, life] of lives) {
    if (life.phases.length === 0 || lastMoment(life) < from || firstMoment(life) > to) continue;
    const row = { key, life, begin: firstMoment(life), depth: 0, parent: null, children: [] };
    rows.push(row);
    // A rid may be used again; the one that began last before its child is meant.
    if (!byRid.has(life.rid)) byRid.set(life.rid, []);
    byRid.get(life.rid).push(row);
  }
  for (const row of rows) {
    if (row.life.parent === undefined) continue;
    const candidates = (byRid.get(row.life.parent) ?? []).filter((each) => isBefore(each, row));
    row.parent = candidates.reduce((best, each) => (best === null || each.begin > best.begin ? each : best), null);
    row.parent?.children.push(row);
  }
  const heads = rows.filter((row) => row.parent === null);
  const newest = new Map(heads.map((head) => [head, family(head).reduce((latest, { begin }) => Math.max(latest, begin), 0)]));
  heads.sort((one, other) => newest.get(other) - newest.get(one) || (one.key < other.key ? -1 : 1));
  return heads.flatMap(family);
}

/** An order of all rows. A parent comes before its child in it, so that no names make a circle. */
function isBefore(one, other) {
  return one.begin === other.begin ? one.key < other.key : one.begin < other.begin;
}

/** A row and all that go on from it, depth first. */
function family(head) {
  const found = [];
  const open = [head];
  while (open.length) {
    const row = open.pop();
    row.depth = row.parent === null ? 0 : row.parent.depth + 1;
    found.push(row);
    open.push(...[...row.children].sort((one, other) => (isBefore(one, other) ? 1 : -1)));
  }
  return found;
}

/** Where the KV of a row's parent was taken over: the end of the parent's lease and the child's first computed token. */
export function passage(row) {
  if (row.parent === null) return null;
  const { phases } = row.life;
  const first = phases.find(([kind]) => kind === "prefill" || kind === "decode") ?? phases[0];
  const leases = row.parent.life.phases.filter(([kind, begin]) => kind === "leased" && begin <= first[1] + 0.001);
  const lease = leases.at(-1);
  const ended = lease === undefined ? Math.min(lastMoment(row.parent.life), first[1]) : Math.min(lease[2] ?? first[1], first[1]);
  return { from: ended, to: first[1], leased: lease !== undefined };
}

export { lifeKey };
