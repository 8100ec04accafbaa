// Puts the page together: the stream fills the store, the panels show it.

import { Charts } from "./charts.js";
import { Connection } from "./connection.js";
import { byId, setAttribute, setText } from "./drawing/dom.js";
import { shortened, tokens, visible } from "./drawing/format.js";
import { Frames } from "./drawing/frames.js";
import { BatchLists, HeldLists } from "./lists.js";
import { LivesPanel } from "./lives/lives_panel.js";
import { MissList } from "./misses.js";
import { showFirstSteps, showNoCache } from "./newcomers.js";
import { Store } from "./data/store.js";
import { EventStream } from "./data/stream.js";
import { Theme } from "./theme.js";
import { Tooltip } from "./drawing/tooltip.js";
import { TreePanel } from "./tree/tree_panel.js";

const store = new Store();
const frames = new Frames();
const theme = new Theme(byId("theme"));
const tooltip = new Tooltip(byId("tip"));
const announce = (words) => setText(byId("announcer"), words);

const charts = new Charts(byId("rates"), { frames, theme });
const tree = new TreePanel(
  { scene: byId("tree-scene"), summary: byId("tree-summary"), crumbs: byId("crumbs"), namespace: byId("namespace") },
  { frames, theme, tooltip, announce },
);
const lives = new LivesPanel(
  {
    scene: byId("lives-scene"),
    summary: byId("lives-summary"),
    window: byId("window"),
    detail: byId("life-detail"),
    empty: byId("lives-empty"),
  },
  { frames, theme, tooltip },
);
const batch = new BatchLists(byId("batch-lists"));
const held = new HeldLists(byId("held-lists"));
const misses = new MissList(byId("held-lists"));
batch.clear();

const showLists = frames.add(() => {
  if (store.update === null) return;
  batch.show(store.update);
  held.show(store.update, store.clock.now());
  misses.show(store.lives.values());
});
const showTree = frames.add(() => {
  if (tree.snapshot !== store.tree) tree.show(store.tree);
});

const connection = new Connection(announce);
const stream = new EventStream(new URL("events", import.meta.url), {
  state: (name, detail) => {
    connection.show(name, detail);
    if (name !== "live") store.clock.freeze(true);
    showEmpty();
  },
  event: (name, data) => {
    if (name === "hello") greet(data);
    else if (name === "update") takeUpdate(data);
    else if (name === "tree") takeTree(data);
  },
});

function greet(hello) {
  const restarted = store.greet(hello);
  if (!store.paused) store.clock.freeze(false);
  if (restarted) {
    tree.clear();
    lives.clear();
    held.clear();
    misses.show([]);
    batch.clear();
    showPaused();
    announce("The server was restarted: what the page showed of the one before is gone");
  }
  const name = visible(shortened(hello.model.split("/").filter(Boolean).at(-1) ?? "", 60));
  setText(byId("model"), `${name} · ${tokens(hello.total_tokens)} · Baton ${visible(hello.version)}`);
  document.title = `${name} · Baton`;
  byId("legend-host").hidden = hello.host_tokens === 0;
  showAll();
}

function takeUpdate(update) {
  store.takeUpdate(update);
  if (store.paused) return;
  charts.show(store.series);
  lives.show(store);
  frames.ask(showLists);
  showEmpty();
}

function takeTree(snapshot) {
  store.takeTree(snapshot);
  if (store.paused) return;
  frames.ask(showTree);
  showEmpty();
}

function showAll() {
  charts.show(store.series);
  lives.show(store);
  frames.ask(showLists);
  frames.ask(showTree);
  showEmpty();
}

function showEmpty() {
  const cached = (store.tree?.spans.length ?? 0) > 0;
  const off = store.hello !== null && !store.hello.radix_cache;
  const nothing = store.hello !== null && !cached && (off || store.lives.size === 0);
  const target = byId("tree-empty");
  const kind = nothing ? (off ? "off" : `first ${stream.key !== null}`) : "none";
  if (target.dataset.kind === kind) return;
  target.dataset.kind = kind;
  target.hidden = !nothing;
  byId("tree-panel").dataset.empty = nothing;
  if (!nothing) target.replaceChildren();
  else if (off) showNoCache(target);
  else showFirstSteps(target, stream.key !== null);
}

function showPaused() {
  setAttribute(byId("pause"), "aria-pressed", store.paused);
  setText(byId("pause"), store.paused ? "Resume" : "Pause");
  document.body.dataset.paused = store.paused;
}

const pause = byId("pause");
pause.addEventListener("click", () => {
  if (store.paused) store.resume();
  else store.pause();
  showPaused();
  announce(store.paused ? "Paused: the page stands still, and goes on collecting" : "Goes on");
  if (!store.paused) showAll();
});

setInterval(() => {
  if (document.hidden) return;
  connection.tick();
  if (!store.paused && store.update !== null) frames.ask(showLists);
}, 1000);

// The window of the timeline moves on by itself, a pixel at a time.
function move() {
  if (!document.hidden && !store.paused && store.lives.size > 0) lives.tick();
  setTimeout(move, document.hidden ? 1000 : lives.pace);
}
move();

connection.attach(stream);
stream.open();
