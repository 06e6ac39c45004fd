/** The sidebar panel: lays out its parts and draws each again when its source changes. */
import { convertPart } from "./convert.js";
import { make } from "./dom.js";
import { devicePart, historyPart } from "./panel_device.js";
import { planPart } from "./panel_plan.js";
import { runPart } from "./panel_run.js";
import { say } from "./words.js";

export const PANEL_ID = "supir-xpu";
const TICK_MS = 500;

/**
 * @typedef {object} Sources
 * @property {import("./plan_watch.js").PlanWatch} plan
 * @property {import("./status_watch.js").StatusWatch} status
 * @property {import("./progress.js").RunProgress} progress
 * @property {() => Promise<void>} applySafePlan
 */

export class Panel {
  /**
   * @param {HTMLElement} element given by the front end
   * @param {Sources} sources
   */
  constructor(element, sources) {
    loadStyle();
    this._sources = sources;
    this._plan = make("div", { "aria-live": "polite" });
    this._run = make("div");
    this._device = make("div");
    this._stop = new AbortController();
    const { signal } = this._stop;
    const root = make("div", { className: "supir-xpu-panel" });
    root.append(
      make("h2", {}, say("title")),
      this._run,
      this._plan,
      this._device,
      convertPart(sources.status, signal),
    );
    element.replaceChildren(root);
    sources.plan.addEventListener("change", () => this._drawPlan(), { signal });
    sources.status.addEventListener("change", () => this._drawDevice(), { signal });
    sources.progress.addEventListener("change", () => this._drawRun(), { signal });
    this._tick = setInterval(() => this._drawRun(), TICK_MS); // the time left runs down
    this._drawPlan();
    this._drawRun();
    this._drawDevice();
    sources.status.ask();
    sources.plan.askSoon();
  }

  /** Stop following the sources. */
  close() {
    this._stop.abort();
    clearInterval(this._tick);
  }

  _drawPlan() {
    const { plan, applySafePlan } = this._sources;
    const focused = focusKey(this._plan);
    this._plan.replaceChildren(
      planPart(plan.state, { apply: applySafePlan, again: () => plan.ask() }),
    );
    refocus(this._plan, focused);
  }

  _drawRun() {
    this._run.replaceChildren(...runPart(this._sources.progress));
  }

  _drawDevice() {
    const { reply, problem } = this._sources.status.state;
    this._device.replaceChildren(devicePart(reply, problem), ...historyPart(reply));
  }
}

/**
 * @param {HTMLElement} part
 * @returns {string | null} which of its buttons has the focus
 */
function focusKey(part) {
  const active = document.activeElement;
  return active && part.contains(active) ? active.getAttribute("data-key") : null;
}

/**
 * @param {HTMLElement} part
 * @param {string | null} key
 */
function refocus(part, key) {
  if (key === null) return;
  const again = part.querySelector(`[data-key="${CSS.escape(key)}"]`);
  if (again instanceof HTMLElement) again.focus();
}

/** Load the panel's style sheet, once. */
function loadStyle() {
  const href = new URL("../panel.css", import.meta.url).href;
  if (document.querySelector(`link[href="${href}"]`)) return;
  document.head.append(make("link", { rel: "stylesheet", href }));
}
