// Texts about a request's life: in its row, in the tooltip, in its details, and for screen readers.

import { count, duration, exact, plural, shortened, visible } from "../drawing/format.js";
import { missesOf, wordsOfMiss } from "../misses.js";

const DOING = {
  queued: "queued",
  loading: "loading",
  prefill: "prefill",
  decode: "decoding",
  retracted: "retracted",
  leased: "leased",
};
const ENDS = { stop: "stopped", length: "reached its length", abort: "aborted", error: "failed" };
const PATHS = {
  handoff: "KV handed over",
  fork: "forked from the running parent",
  match: "found in the cache",
  tier: "loaded from a lower tier",
  fallback: "nothing found, prompt computed again",
};

export function nameOf(life) {
  return life.index > 0 ? `${visible(life.rid)} #${life.index + 1}` : visible(life.rid);
}

/** Each kind once, in order of its first phase: [{kind, times, seconds, tokens, running}]. */
export function summary(life, now) {
  const kinds = new Map();
  for (const [kind, begin, end, tokens] of life.phases) {
    if (!kinds.has(kind)) kinds.set(kind, { kind, times: 0, seconds: 0, tokens: 0, running: false });
    const own = kinds.get(kind);
    own.times++;
    own.seconds += Math.max(0, (end ?? now) - begin);
    own.tokens += tokens ?? 0;
    own.running ||= end === null;
  }
  return [...kinds.values()];
}

export function handedTo(life) {
  return life.child === undefined ? null : `handed off to ${visible(shortened(life.child, 60))}`;
}

/** Its current phase, in a word. */
export function stateOf(life) {
  const last = life.phases.at(-1);
  if (last !== undefined && last[2] === null) return DOING[last[0]] ?? visible(last[0]);
  if (life.child !== undefined) return "handed off";
  // The details say how it ended well.
  return life.end === "abort" || life.end === "error" ? ENDS[life.end] : "done";
}

/** Without figures that change all the time, so that a screen reader reads out events, not every token. */
export function spokenOf(life) {
  const parts = [shortened(nameOf(life), 80)];
  if (life.parent !== undefined) parts.push(`continues ${visible(shortened(life.parent, 80))}`);
  for (const { kind, times, running } of summary(life, 0)) {
    const what = kind === "prefill" ? `prefill in ${plural(times, "chunk")}` : (DOING[kind] ?? visible(kind));
    parts.push(running ? `${what} now` : what);
  }
  if (life.end !== undefined) parts.push(ENDS[life.end] ?? visible(life.end));
  if (life.child !== undefined) parts.push(handedTo(life));
  return parts.join(", ");
}

/** [[name, value], …] */
export function factsOf(life, now) {
  const facts = [["Request", shortened(nameOf(life), 200)]];
  const prompt = life.cached > 0 ? `${exact(life.prompt)} tokens, ${exact(life.cached)} of them cached` : `${exact(life.prompt)} tokens`;
  facts.push(["Prompt", prompt], ["Output", `${exact(life.output)} tokens`]);
  const missed = missesOf(life);
  if (missed.length > 0) facts.push(["Not found", missed.map(wordsOfMiss).join("; ")]);
  if (life.path !== undefined) facts.push(["Path", PATHS[life.path] ?? visible(life.path)]);
  for (const { kind, times, seconds, tokens, running } of summary(life, now)) {
    const chunks = kind === "prefill" ? `, ${plural(times, "chunk")} of ${count(tokens)} tokens in all` : "";
    const kept = kind === "leased" && tokens ? `, ${count(tokens)} tokens` : "";
    facts.push([kind[0].toUpperCase() + visible(kind.slice(1)), `${duration(seconds)}${chunks}${kept}${running ? ", now" : ""}`]);
  }
  if (life.end !== undefined) facts.push(["End", ENDS[life.end] ?? visible(life.end)]);
  if (life.job_id !== undefined) facts.push(["Job", visible(shortened(life.job_id, 200))]);
  return facts;
}

/** {name, state, spoken} of a request's row. Its job is named where no row of the job stands above it. */
export function wordsOfRow({ life, depth, header }) {
  const job = life.job_id ?? "";
  const isNamed = header === null && job !== "" && !job.includes(life.rid) && !life.rid.includes(job);
  const name = isNamed ? `${visible(shortened(job, 30))} · ${nameOf(life)}` : nameOf(life);
  const spoken = isNamed ? `${spokenOf(life)}, of job ${visible(shortened(job, 80))}` : spokenOf(life);
  return { name: `${depth > (header === null ? 0 : 1) ? "↳ " : ""}${shortened(name, 60)}`, state: stateOf(life), spoken };
}

/** {name, state, spoken} of a job's row. */
export function wordsOfJob({ job, members, isFolded }) {
  const name = visible(shortened(job, 60));
  const size = plural(members.length, "request");
  return { name: `${isFolded ? "▸" : "▾"} ${name}`, state: size, spoken: `job ${name}, ${size}, ${isFolded ? "folded" : "unfolded"}` };
}

export function factsOfJob({ job, members }) {
  const sum = (value) => exact(members.reduce((total, { life }) => total + value(life), 0));
  return [
    ["Job", visible(shortened(job, 200))],
    ["Requests", exact(members.length)],
    ["Prompts", `${sum((life) => life.prompt)} tokens, ${sum((life) => life.cached)} of them cached`],
    ["Output", `${sum((life) => life.output)} tokens`],
  ];
}
