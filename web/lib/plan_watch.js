/** Keeps the server's judgement of the graph on screen up to date while it is edited. */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { ourNodes } from "./graph_nodes.js";
import { say } from "./words.js";

/** Quiet time after an edit before the server is asked. */
const PAUSE_MS = 350;

/**
 * @typedef {object} PlanState
 * @property {any} reply of `POST /supir_xpu/plan`, or null
 * @property {string} problem why there is none, in words
 * @property {boolean} asking
 */

/** Dispatches `change` when the state has changed. */
export class PlanWatch extends EventTarget {
  constructor() {
    super();
    /** @type {PlanState} */
    this.state = { reply: null, problem: "", asking: false };
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._timer = undefined;
    /** @type {AbortController | null} */
    this._request = null;
    this._asked = "";
    this._away = false;
  }

  /**
   * Say whether the server can be reached; while it cannot, nothing is asked.
   * @param {boolean} there
   */
  setConnected(there) {
    if (there !== this._away) return;
    this._away = !there;
    if (there) this.askSoon({ again: true });
    else this.ask();
  }

  /** Another graph is on screen: what was said of the one before does not hold for it. */
  restart() {
    this._drop();
    this._set({ reply: null, problem: "", asking: true });
    this.askSoon();
  }

  /**
   * Ask when editing pauses.
   * @param {{again?: boolean}} [options] again: even if the graph is the same
   */
  askSoon({ again = false } = {}) {
    if (again) this._asked = "";
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.ask({ again: false }), PAUSE_MS);
  }

  /**
   * Ask now; an older request is dropped.
   * @param {{again?: boolean}} [options]
   */
  async ask({ again = true } = {}) {
    clearTimeout(this._timer);
    if (!ourNodes().length) {
      this._drop();
      this._set({ reply: null, problem: say("plan.none"), asking: false });
      return;
    }
    if (this._away) {
      this._drop();
      this._set({ reply: null, problem: say("plan.unreachable"), asking: false });
      return;
    }
    const body = await this._body();
    if (body === null) {
      this._set({ ...this.state, asking: false });
      return;
    }
    if (body === this._asked && !again) {
      this._set(this.state); // the same graph, but its nodes may be new objects
      return;
    }
    this._drop();
    this._asked = body;
    const request = new AbortController();
    this._request = request;
    this._set({ ...this.state, asking: true });
    const state = await judge(body, request.signal);
    if (this._request !== request) return; // a newer one is under way
    this._request = null;
    if (state.problem) this._asked = "";
    this._set(state);
  }

  /** @returns {Promise<string | null>} null while the graph cannot be read, as during loading */
  async _body() {
    try {
      const { output } = await app.graphToPrompt();
      return JSON.stringify({ prompt: output, editing: true });
    } catch (error) {
      console.debug("SUPIR XPU: the graph was not read", error);
      return null;
    }
  }

  _drop() {
    this._request?.abort();
    this._request = null;
    this._asked = "";
  }

  /** @param {PlanState} state */
  _set(state) {
    this.state = state;
    this.dispatchEvent(new Event("change"));
  }
}

/**
 * @param {string} body
 * @param {AbortSignal} signal
 * @returns {Promise<PlanState>}
 */
async function judge(body, signal) {
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await api.fetchApi("/supir_xpu/plan", { method: "POST", headers, body, signal });
    const reply = await answer.json();
    if (answer.ok && reply.problem) return { reply: null, problem: reply.problem, asking: false };
    if (answer.ok) return { reply, problem: "", asking: false };
    return { reply: null, problem: reply?.error?.message ?? answer.statusText, asking: false };
  } catch {
    return { reply: null, problem: say("plan.unreachable"), asking: false };
  }
}
