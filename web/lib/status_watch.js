/** What the server knows about the device, its crashes and its clean runs. */
import { api } from "../../../scripts/api.js";
import { say } from "./words.js";

const PAUSE_MS = 500;

/** Dispatches `change` when a new answer is there. */
export class StatusWatch extends EventTarget {
  constructor() {
    super();
    /** @type {{reply: any, problem: string}} */
    this.state = { reply: null, problem: "" };
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this._timer = undefined;
  }

  askSoon() {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.ask(), PAUSE_MS);
  }

  async ask() {
    clearTimeout(this._timer);
    try {
      const reply = await (await api.fetchApi("/supir_xpu/status")).json();
      this.state = { reply, problem: reply.problem ?? "" };
    } catch {
      this.state = { reply: null, problem: say("plan.unreachable") };
    }
    this.dispatchEvent(new Event("change"));
  }
}
