// One animation frame for all panels. A page that is hidden draws nothing; one that nothing changes on, neither.

export class Frames {
  #parts = new Set();
  #dirty = new Set();
  #requested = false;

  constructor() {
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.all();
    });
  }

  /** draw(now in ms): called in the next frame after ``ask(draw)``. */
  add(draw) {
    this.#parts.add(draw);
    this.ask(draw);
    return draw;
  }

  ask(draw) {
    this.#dirty.add(draw);
    if (this.#requested || document.hidden) return;
    this.#requested = true;
    requestAnimationFrame((now) => this.#run(now));
  }

  all() {
    for (const draw of this.#parts) this.ask(draw);
  }

  #run(now) {
    this.#requested = false;
    // Hidden since the frame was asked for: what is due stays so.
    if (document.hidden) return;
    const due = [...this.#dirty];
    this.#dirty.clear();
    for (const draw of due) draw(now);
  }
}
