/** Where a run of our nodes is: phase, progress, time left, rest. From the server's events alone. */
import { api } from "../../../scripts/api.js";

/** Part of a phase after which its own pace replaces the prediction for the time left. */
const MEASURED_FROM = 0.05;

/**
 * @typedef {object} RunState
 * @property {string} node what the run report calls the node; empty when nothing runs
 * @property {string} phase
 * @property {number} index of the phase, from 0
 * @property {number} count of phases
 * @property {[number, number]} bar which part of how many of ComfyUI's progress bar the phase is
 * @property {number} part of the phase that is done, 0 to 1
 * @property {number} planned predicted seconds of the phase
 * @property {number} later predicted seconds of the phases after it
 * @property {number} began when the phase began, in ms of the page's clock
 * @property {string} waiting why the device rests; empty when it does not
 * @property {number} rest seconds of rest that are left
 * @property {string} checking what the check of the device is at; empty when there is none
 * @property {string} stall what the server says about a phase that does not go on
 */

/** @returns {RunState} */
const idle = () => ({
  node: "", phase: "", index: 0, count: 0, bar: [0, 1], part: 0, planned: 0, later: 0, began: 0,
  waiting: "", rest: 0, checking: "", stall: "",
}); // prettier-ignore

/** Dispatches `change` when something happened. */
export class RunProgress extends EventTarget {
  constructor() {
    super();
    this.state = idle();
  }

  /** Start to follow the server's events. */
  listen() {
    api.addEventListener("supir_xpu.phase", (/** @type {any} */ e) => this._phase(e.detail));
    api.addEventListener("supir_xpu.wait", (/** @type {any} */ e) => this._wait(e.detail));
    api.addEventListener("supir_xpu.stall", (/** @type {any} */ e) =>
      this._set({ stall: e.detail.message }),
    );
    api.addEventListener("supir_xpu.preflight", (/** @type {any} */ e) =>
      this._set({ checking: e.detail.text }),
    );
    api.addEventListener("progress", (/** @type {any} */ e) => this._step(e.detail));
    for (const name of [
      "execution_start", "executing", "execution_success", "execution_error",
      "execution_interrupted",
    ]) {
      api.addEventListener(name, () => this.reset());
    } // prettier-ignore
  }

  reset() {
    this._set(idle());
  }

  /**
   * @returns {number | null} seconds until the node ends, by the phase's own pace or else by the
   *   prediction; null when it takes longer than predicted
   */
  secondsLeft() {
    const { part, planned, later, began } = this.state;
    const elapsed = (performance.now() - began) / 1000;
    if (part >= MEASURED_FROM) return (elapsed * (1 - part)) / part + later;
    return elapsed > planned ? null : planned - elapsed + later;
  }

  /** @param {any} event */
  _phase(event) {
    if (event.state !== "start") {
      this._set({ part: 1, stall: "" });
      return;
    }
    this._set({
      ...idle(),
      node: event.node,
      phase: event.phase,
      index: event.index ?? 0,
      count: event.count ?? 1,
      bar: event.bar ?? [0, 1],
      planned: event.planned_s ?? 0,
      later: Math.max(0, (event.remaining_s ?? 0) - (event.planned_s ?? 0)),
      began: performance.now(),
    });
  }

  /** @param {any} event */
  _wait(event) {
    this._set({ waiting: event.seconds_left > 0 ? event.why : "", rest: event.seconds_left });
  }

  /** @param {any} event ComfyUI's own progress bar of a node */
  _step(event) {
    const { node, bar } = this.state;
    if (!node || !event.max) return;
    const done = (event.value / event.max) * bar[1] - bar[0];
    this._set({ part: Math.min(1, Math.max(this.state.part, done)) });
  }

  /** @param {Partial<RunState>} values */
  _set(values) {
    this.state = { ...this.state, ...values };
    this.dispatchEvent(new Event("change"));
  }
}
