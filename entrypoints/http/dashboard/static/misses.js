// The last prompts that the cache did not have although it might have: how much, where in the prompt, and why.

import { firstMoment, lifeKey } from "./data/store.js";
import { element, setText } from "./drawing/dom.js";
import { count, duration, exact, shortened, visible } from "./drawing/format.js";
import { ListTable, name } from "./lists.js";

const MAX_MISSES = 100;
/** New tokens, and those that every request computes, are no misses. */
const EXPECTED = new Set(["unseen", "required"]);
const WORDS = {
  not_loaded: "not loaded",
  not_looked_up: "not looked up",
  no_state: "without a state behind them",
  no_window: "without the window before them",
  namespace: "in another namespace",
  page: "not a whole page",
  disabled: "no prefix cache",
};

/** [[reason, start, tokens, seconds ago or null, by or null], …] */
export function missesOf(life) {
  return (life.missed ?? []).filter(([reason]) => !EXPECTED.has(reason));
}

export function wordsOfMiss([reason, start, tokens, ago, by]) {
  const when = ago === null ? "" : `, ${duration(ago)} before`;
  const whom = by === null ? "" : `, for ${visible(shortened(by, 60))}`;
  return `${exact(tokens)} ${WORDS[reason] ?? visible(reason)} from ${exact(start)} on${when}${whom}`;
}

export class MissList {
  constructor(container) {
    this.table = new ListTable(
      container,
      "Misses",
      [["Request", "name"], ["Where", "bar"], ["Why", "why"]],
      (cells, life) => {
        const missed = missesOf(life);
        name(cells[0], life.rid, life.job_id);
        const tokens = missed.reduce((sum, span) => sum + span[2], 0);
        places(cells[1], life.prompt, missed, `${count(tokens)} / ${count(life.prompt)}`);
        setText(cells[2], missed.map(wordsOfMiss).join("; "));
      },
    );
  }

  /** lives: of the store. */
  show(lives) {
    const missed = [...lives].filter((life) => missesOf(life).length > 0).sort((one, other) => firstMoment(other) - firstMoment(one));
    const items = missed.slice(0, MAX_MISSES).map((life) => [lifeKey(life), life]);
    this.table.show(items, missed.length, "No miss. New tokens, which nothing has computed before, do not count.");
  }
}

/** Marks the spans of a prompt of so many tokens, under ``words``. */
function places(cell, whole, spans, words) {
  let [label, track] = cell.children;
  if (label === undefined) {
    label = element("span");
    track = element("span", { class: "track places", "aria-hidden": "true" });
    cell.append(label, track);
  }
  setText(label, words);
  while (track.children.length > spans.length) track.lastElementChild.remove();
  while (track.children.length < spans.length) track.append(element("i"));
  spans.forEach(([, start, tokens], index) => {
    const mark = track.children[index];
    mark.style.left = `${((100 * start) / Math.max(1, whole)).toFixed(1)}%`;
    mark.style.width = `${((100 * tokens) / Math.max(1, whole)).toFixed(1)}%`;
  });
}
