/** The badges on our nodes: the verdict, and what the run will make and take. */
import { app } from "../../../scripts/app.js";
import { about, pixels } from "./format.js";
import { findNode } from "./graph_nodes.js";
import { say } from "./words.js";

/** Text and background of each verdict, at least 4.5:1 apart; the word says the same. */
const COLORS = {
  ok: { fgColor: "#ffffff", bgColor: "#1e6e34" },
  warn: { fgColor: "#1f1500", bgColor: "#f0b429" },
  block: { fgColor: "#ffffff", bgColor: "#b3261e" },
};
const FACTS = { fgColor: "#ffffff", bgColor: "#45494f" };

/** @type {WeakMap<object, any>} what was found about a node */
let findings = new WeakMap();
let revision = 0;

/**
 * @param {any} finding one node's part of the server's reply
 * @returns {"ok" | "warn" | "block"}
 */
export function levelOf(finding) {
  return finding.refuses || finding.error ? "block" : (finding.severity ?? "ok");
}

/**
 * @param {any} finding
 * @returns {string} the verdict in a word
 */
export function verdictWord(finding) {
  if (finding.error) return say("verdict.error");
  if (finding.refuses) return say("verdict.refused");
  return say(`verdict.${levelOf(finding)}`);
}

/**
 * @param {any} finding
 * @returns {string} size, tiles and time of a node's run
 */
export function factsText(finding) {
  const made = finding.plan;
  if (!made) return "";
  const parts = [pixels(made.output_px)];
  if (made.tiles > 1) parts.push(say("badge.tiles", { count: made.tiles }));
  parts.push(about(made.seconds + (finding.waits_s ?? 0)));
  return parts.join(" \u00b7 ");
}

/** @param {any} node one of ours */
export function attachBadges(node) {
  if (!Array.isArray(node.badges) || !window.LGraphBadge) return;
  node.badges.push(
    () => badge(node, (finding) => ({ text: verdictWord(finding), ...COLORS[levelOf(finding)] })),
    () => badge(node, (finding) => ({ text: factsText(finding), ...FACTS })),
  );
}

/**
 * @param {any} node
 * @param {(finding: any) => object} look
 */
function badge(node, look) {
  // Nodes 2.0 evaluates badges in a computed value: it sees changes of this (reactive) store only.
  void app.extensionManager?.supirXpuRevision;
  const finding = findings.get(node);
  return new window.LGraphBadge(finding ? look(finding) : { text: "" });
}

/** @param {any} reply of the server, or null */
export function showBadges(reply) {
  findings = new WeakMap();
  for (const finding of Object.values(reply?.nodes ?? {})) {
    const node = findNode(/** @type {any} */ (finding).node_id);
    if (node) findings.set(node, finding);
  }
  revision += 1;
  if (app.extensionManager) app.extensionManager.supirXpuRevision = revision;
  app.canvas?.setDirty(true, true);
}
