/**
 * The pack's part of ComfyUI's editor: puts badges on our nodes, adds the panel, and speaks up when a
 * run is refused or fails. Everything shown was decided by the server; nothing here judges.
 */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { applyChanges } from "./lib/apply.js";
import { attachBadges, showBadges } from "./lib/badges.js";
import { isOurs, ourNodes } from "./lib/graph_nodes.js";
import { PANEL_ID, Panel } from "./lib/panel.js";
import { PlanWatch } from "./lib/plan_watch.js";
import { RunProgress } from "./lib/progress.js";
import { StatusWatch } from "./lib/status_watch.js";
import { announce, installToasts } from "./lib/toasts.js";
import { loadWords, say } from "./lib/words.js";

const plan = new PlanWatch();
const status = new StatusWatch();
const progress = new RunProgress();
/** @type {Panel | null} */
let panel = null;

/** Set the widgets to the safe plan the server named, and ask it again. */
async function applySafePlan() {
  if (plan.state.asking) {
    announce("info", say("plan.asking"));
    return;
  }
  const changes = plan.state.reply?.safe_plan ?? [];
  if (!changes.length) {
    announce("info", say("apply.nothing"));
    return;
  }
  const missed = applyChanges(changes);
  const set = changes.length - missed.length;
  if (missed.length) {
    const names = missed.map((change) => change.input_name).join(", ");
    announce("warn", say("apply.missed", { names }));
  } else {
    announce("success", say("apply.done", { count: set }));
  }
  await plan.ask();
}

app.registerExtension({
  name: "supir_xpu.panel",
  commands: [
    { id: "SupirXpu.CheckPlan", label: "SUPIR XPU: check the plan", function: () => plan.ask() },
    { id: "SupirXpu.ApplySafePlan", label: "SUPIR XPU: apply the safe plan", function: applySafePlan },
  ],
  menuCommands: [
    { path: ["Extensions", "SUPIR XPU"], commands: ["SupirXpu.CheckPlan", "SupirXpu.ApplySafePlan"] },
  ],

  /** @param {any} node */
  nodeCreated(node) {
    if (!isOurs(node)) return;
    attachBadges(node);
    for (const widget of node.widgets ?? []) {
      const before = widget.callback; // what both renderers call; graphChanged comes later in one
      widget.callback = function (/** @type {any[]} */ ...args) {
        plan.askSoon();
        return before?.apply(this, args);
      };
    }
    plan.askSoon();
  },

  afterConfigureGraph() {
    plan.restart();
  },

  async setup() {
    await loadWords();
    plan.addEventListener("change", () => showBadges(plan.state.reply));
    api.addEventListener("graphChanged", () => plan.askSoon());
    for (const ended of ["execution_success", "execution_error", "execution_interrupted"]) {
      api.addEventListener(ended, () => {
        if (!ourNodes().length) return;
        plan.askSoon({ again: true });
        status.askSoon();
      });
    }
    api.addEventListener("reconnecting", () => plan.setConnected(false));
    api.addEventListener("reconnected", () => {
      progress.reset();
      plan.setConnected(true);
      plan.askSoon({ again: true });
      status.askSoon();
    });
    progress.listen();
    installToasts();
    app.extensionManager.registerSidebarTab({
      id: PANEL_ID,
      icon: "pi pi-shield",
      title: say("title"),
      tooltip: say("tooltip"),
      type: "custom",
      render: (/** @type {HTMLElement} */ element) => {
        panel?.close();
        panel = new Panel(element, { plan, status, progress, applySafePlan });
      },
      destroy: () => {
        panel?.close();
        panel = null;
      },
    });
    plan.askSoon();
  },
});
