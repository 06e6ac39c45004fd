/** Short messages: a run that was refused or failed, with what to do about it. */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { titleOf } from "./graph_nodes.js";
import { say } from "./words.js";

const LONGEST_TEXT = 700;
const LIFE_MS = { info: 5000, success: 5000, warn: 12000, error: 30000 };

/**
 * @param {"info" | "success" | "warn" | "error"} severity
 * @param {string} detail
 * @param {string} [summary]
 */
export function announce(severity, detail, summary = say("title")) {
  const text = detail.length > LONGEST_TEXT ? `${detail.slice(0, LONGEST_TEXT)} \u2026` : detail;
  app.extensionManager.toast.add({ severity, summary, detail: text, life: LIFE_MS[severity] });
}

/** Speak when the guard refuses or warns, and when one of our nodes fails. */
export function installToasts() {
  api.addEventListener("supir_xpu.guard", (/** @type {any} */ event) => onGuard(event.detail));
  api.addEventListener("execution_error", (/** @type {any} */ event) => onError(event.detail));
}

/**
 * @param {any} finding
 * @returns {string} name of the node, and what speaks against its run
 */
function reasons(finding) {
  const title = titleOf(finding.node_id, finding.class_type);
  const risks = (finding.risks ?? []).filter((/** @type {any} */ r) => r.severity === "block" || r.points > 0);
  const names = risks.map((/** @type {any} */ r) => `${say(`codes.${r.code}`, {}, r.code)} [${r.code}]`);
  return `${title}: ${finding.error || names.join("; ") || finding.reason || ""}`;
}

/**
 * @param {any} data of the guard's event
 * @returns {string} the changes with which it would be queued, or what the gravest risks ask for
 */
function actions({ suggestion, refused }) {
  if (suggestion?.length) {
    const changes = suggestion.map(
      (/** @type {import("./apply.js").Change} */ c) =>
        `${titleOf(c.node_id, c.node_id)}: ${c.input_name} \u2192 ${c.value}`,
    );
    return [say("toast.apply"), ...changes].join("\n");
  }
  const asked = refused.flatMap((/** @type {any} */ f) => f.risks?.[0]?.action ?? []);
  return [say("toast.change"), ...new Set(asked)].join("\n");
}

/** @param {any} data */
function onGuard(data) {
  if (data.refused?.length) {
    const text = [actions(data), ...data.refused.map(reasons)].join("\n");
    announce("error", text, say("toast.refused"));
  } else if (data.warnings?.length) {
    announce("warn", data.warnings.map(reasons).join("\n"), say("toast.risky"));
  }
}

/** @param {any} data */
function onError(data) {
  if (!String(data.node_type ?? "").startsWith("SUPIR_XPU_")) return;
  const title = titleOf(data.node_id, data.node_type);
  announce("error", String(data.exception_message ?? "").trim(), say("toast.failed", { title }));
}
