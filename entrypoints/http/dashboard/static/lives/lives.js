// Which requests the timeline shows, in which rows: a child right below the request that it continues, and the requests
// of a job together, below a row of the job's own, which may stand for all of them.

import { firstMoment, lastMoment, lifeKey } from "../data/store.js";

/**
 * lives: Map from key to life; those that something happened to between ``from`` and ``to`` are shown.
 * folded: keys of job rows. Returns [{key, life, depth, parent (a row) or null, children, header}, …], the newest family,
 * or job, first, its members in order. header: the row of its job, if it has one; null otherwise. Job rows have a null
 * life, and {job, members (rows), isFolded}: their members follow unless they are folded.
 */
export function rowsOf(lives, from, to, folded = new Set()) {
  const rows = [];
  const byRid = new Map();
  for (const [key, life] of lives) {
    if (life.phases.length === 0 || lastMoment(life) < from || firstMoment(life) > to) continue;
    const row = { key, life, begin: firstMoment(life), depth: 0, parent: null, children: [], header: null };
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
  const blocks = [...blocksOf(heads)];
  blocks.sort((one, other) => other.newest - one.newest || (one.key < other.key ? -1 : 1));
  return blocks.flatMap((block) => shownOf(block, folded));
}

/** Families that are shown together, as they are of one job, or alone: {key, job, members, newest}. */
function blocksOf(heads) {
  const blocks = new Map();
  for (const head of heads) {
    const job = head.life.job_id;
    const key = job === undefined ? head.key : jobKey(job);
    if (!blocks.has(key)) blocks.set(key, { key, job, heads: [] });
    blocks.get(key).heads.push(head);
  }
  for (const block of blocks.values()) {
    block.heads.sort((one, other) => (isBefore(one, other) ? -1 : 1));
    block.members = block.heads.flatMap(family);
    block.newest = block.members.reduce((latest, { begin }) => Math.max(latest, begin), 0);
  }
  return blocks.values();
}

/** A job of a single request needs no row of its own. */
function shownOf({ key, job, members }, folded) {
  if (job === undefined || members.length === 1) return members;
  const header = { key, life: null, job, members, isFolded: folded.has(key), depth: 0, parent: null, children: [members[0]], header: null };
  for (const row of members) {
    row.header = header;
    row.depth += 1;
  }
  return header.isFolded ? [header] : [header, ...members];
}

export function jobKey(job) {
  return `job ${job}`;
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
