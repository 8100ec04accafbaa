// A canvas that is as sharp as the screen and stays in place while what it shows scrolls.

/**
 * Inside ``scene``: a box that scrolls, in it a space as high as the whole drawing, in it the canvas, which sticks, and
 * a layer for elements that scroll along. Only what is in view is ever drawn.
 */
export class Scene {
  constructor(scene, redraw) {
    this.box = document.createElement("div");
    this.box.className = "scene-box";
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.layer = document.createElement("div");
    this.layer.className = "scene-layer";
    this.box.append(this.canvas, this.layer);
    scene.append(this.box);
    this.context = this.canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    this.#space = -1;
    this.redraw = redraw;
    this.box.addEventListener("scroll", redraw, { passive: true });
    new ResizeObserver(redraw).observe(this.box);
  }

  #space;

  /** Height of the whole drawing, in CSS pixels. */
  setSpace(height) {
    if (height === this.#space) return;
    this.#space = height;
    this.layer.style.height = `${height}px`;
  }

  get top() {
    return this.box.scrollTop;
  }

  /** Fit the canvas to the box, clear it, and return its context, in CSS pixels. */
  begin() {
    const scale = devicePixelRatio || 1;
    const width = this.box.clientWidth;
    const height = this.box.clientHeight;
    if (width !== this.width || height !== this.height || scale !== this.scale) {
      this.width = width;
      this.height = height;
      this.scale = scale;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
      this.canvas.style.marginBottom = `${-height}px`;
    }
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, height);
    return this.context;
  }

  /** Scroll as little as needed for the rows from ``top`` to ``bottom`` to be seen. */
  reveal(top, bottom) {
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (bottom > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = bottom - this.box.clientHeight;
  }
}

/** A pattern of slanted lines, for what must not be told by colour alone. */
export function hatch(context, colour, pitch = 5, width = 1.5) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = pitch * 2;
  const pen = tile.getContext("2d");
  pen.scale(2, 2);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.lineCap = "square";
  for (const shift of [-pitch, 0, pitch]) {
    pen.beginPath();
    pen.moveTo(shift, pitch);
    pen.lineTo(shift + pitch, 0);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

/** Text that is no wider than ``width``, or none where not even a few characters fit. */
export function fitted(context, text, width) {
  if (width < 14) return "";
  const room = Math.floor(width / 4);
  let shown = text.length > room ? text.slice(0, room) : text;
  let measured = context.measureText(shown).width;
  if (measured <= width && shown.length === text.length) return shown;
  while (shown.length > 1 && measured > width - 8) {
    shown = shown.slice(0, Math.max(1, Math.floor((shown.length * (width - 8)) / measured) - 1));
    measured = context.measureText(shown).width;
    if (shown.length === 1) break;
  }
  return measured <= width - 8 && shown.length > 1 ? `${shown.replace(/[\ud800-\udbff]$/, "")}…` : "";
}
