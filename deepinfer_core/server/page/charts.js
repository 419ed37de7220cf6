// Small line charts, drawn by hand as SVG: the last two minutes, newest at the right.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 80;
export const POINTS = 120;

function part(parent, name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

function label(parent, className) {
  const element = document.createElement("span");
  element.className = className;
  element.setAttribute("aria-hidden", "true");
  parent.append(element);
  return element;
}

/** Return the next round number at or above a value. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

export class Chart {
  /**
   * @param {HTMLElement} figure where it is drawn
   * @param {{what: string, series: string[], show: (value: number) => string, top?: number, unmarked?: boolean}}
   *   options what it shows, a name for each line (the first is filled), how a value is written, a fixed top of the
   *   scale, and whether that top goes without saying
   */
  constructor(figure, options) {
    this.options = options;
    this.values = options.series.map(() => Array(POINTS).fill(null));
    figure.classList.toggle("marked", !options.unmarked);
    const svg = part(figure, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.svg = svg;
    part(svg, "line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT });
    part(svg, "line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2, "stroke-dasharray": "2 4" });
    this.area = part(svg, "path", { class: "area a" });
    this.lines = options.series.map((_, index) => part(svg, "path", { class: `line ${"ab"[index]}` }));
    this.hair = part(svg, "line", { class: "hair", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.top = label(figure, "top");
    this.tip = label(figure, "tip");
    figure.addEventListener("pointermove", (event) => {
      const box = figure.getBoundingClientRect();
      this.at = Math.round(((event.clientX - box.left) / box.width) * (POINTS - 1));
      this.point();
    });
    figure.addEventListener("pointerleave", () => {
      this.at = undefined;
      this.point();
    });
    this.draw();
  }

  /** Add one value for each line; null where there is none. */
  push(...values) {
    values.forEach((value, index) => {
      this.values[index].push(value);
      this.values[index].shift();
    });
    this.draw();
  }

  draw() {
    const { what, series, show, unmarked } = this.options;
    const known = this.values.flat().filter((value) => value !== null);
    this.scale = this.options.top ?? roundUp(Math.max(0, ...known));
    this.values.forEach((values, index) => {
      const { line, area } = this.paths(values);
      this.lines[index].setAttribute("d", line);
      if (index === 0) this.area.setAttribute("d", area);
    });
    this.top.textContent = known.length && !unmarked ? show(this.scale) : "";
    const now = series.map((name, index) => [name, this.values[index].at(-1)]);
    const said = now.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${show(value)}`);
    this.svg.setAttribute("aria-label", `${what}, last two minutes: ${said.join(", ") || "nothing yet"}`);
    this.point();
  }

  /** Return the path of a line, with gaps where values are missing, and of the area below it. */
  paths(values) {
    let line = "";
    let area = "";
    let first = null;
    values.forEach((value, index) => {
      if (value === null) return;
      const x = this.x(index).toFixed(1);
      const y = (HEIGHT * (1 - Math.min(1, value / this.scale))).toFixed(1);
      const begins = index === 0 || values[index - 1] === null;
      if (begins) first = x;
      line += `${begins ? "M" : "L"}${x} ${y}`;
      area += begins ? `M${x} ${HEIGHT}L${x} ${y}` : `L${x} ${y}`;
      if (index === values.length - 1 || values[index + 1] === null) area += `L${x} ${HEIGHT}L${first} ${HEIGHT}Z`;
    });
    return { line, area };
  }

  x(index) {
    return (index / (POINTS - 1)) * WIDTH;
  }

  /** Show the values below the pointer. */
  point() {
    const { series, show } = this.options;
    const here = this.at === undefined ? [] : this.values.map((values) => values[this.at] ?? null);
    const shown = here.some((value) => value !== null);
    this.hair.setAttribute("visibility", shown ? "visible" : "hidden");
    this.tip.textContent = "";
    if (!shown) return;
    this.hair.setAttribute("x1", this.x(this.at));
    this.hair.setAttribute("x2", this.x(this.at));
    const words = here.map((value, index) => (value === null ? "" : `${series[index]} ${show(value)}`));
    this.tip.textContent = `${words.filter(Boolean).join(", ")} ${POINTS - 1 - this.at} s ago`;
  }
}
