/** The panel's part on the plan: verdict, every node, every risk, and the safe plan. */
import { factsText, levelOf, verdictWord } from "./badges.js";
import { list, make, section } from "./dom.js";
import { about, duration, gib, whole } from "./format.js";
import { findNode, isConnected, showNode, titleOf } from "./graph_nodes.js";
import { language, say } from "./words.js";

/** What is said of a run by the severest verdict of its nodes. @type {Record<string, string>} */
const DETAILS = {
  ok: "plan.ok", warn: "plan.warn", block: "plan.block", unknown: "plan.unknown_all",
}; // prettier-ignore

/**
 * @param {import("./plan_watch.js").PlanState} state
 * @param {{apply: () => void, again: () => void}} actions
 * @returns {HTMLElement}
 */
export function planPart(state, actions) {
  const again = make(
    "button",
    { type: "button", onclick: actions.again, disabled: state.asking, "data-key": "again" },
    say("plan.again"),
  );
  const { reply } = state;
  if (!reply) {
    const text = state.asking ? say("plan.asking") : state.problem;
    return section("plan", say("plan.title"), make("p", { role: "status" }, text), again);
  }
  const nodes = Object.values(reply.nodes);
  const known = reply.total.severity !== "unknown";
  return section(
    "plan",
    say("plan.title"),
    verdict(reply),
    known ? totals(reply) : null,
    unknownSizes(reply.size_unknown ?? []),
    safePlan(reply.safe_plan ?? [], actions.apply, state.asking),
    ...gravestOfEach(nodes).map(riskPart),
    make("h4", {}, say("plan.nodes")),
    ...nodes.map(nodePart),
    again,
  );
}

/**
 * @param {any} reply
 * @returns {HTMLElement}
 */
function verdict(reply) {
  const level = reply.refused ? "block" : reply.total.severity;
  const word = reply.refused ? say("verdict.refused") : say(`verdict.${level}`);
  const detail = say(reply.refused ? "plan.refused" : DETAILS[level]);
  return make(
    "p",
    { className: "verdict", "data-level": level, role: "status" },
    make("strong", {}, word),
    ` ${detail}`,
  );
}

/**
 * @param {any} reply
 * @returns {HTMLElement}
 */
function totals({ total }) {
  return list([
    [say("plan.time"), about(total.seconds)],
    [say("plan.rest"), total.waits_s ? duration(total.waits_s) : null],
    [say("plan.launches"), whole(total.launches, language())],
  ]);
}

/**
 * @param {import("./apply.js").Change[]} changes
 * @param {() => void} apply
 * @param {boolean} asking whether a newer answer is under way
 * @returns {HTMLElement | null}
 */
function safePlan(changes, apply, asking) {
  if (!changes.length) return null;
  const connected = changes.filter((change) => isConnected(findNode(change.node_id), change.input_name));
  const lines = changes.map((change) => {
    const { node_id, input_name, value } = change;
    const widget = findNode(node_id)?.widgets?.find((/** @type {any} */ w) => w.name === input_name);
    const linked = connected.includes(change);
    const before = linked ? `(${say("apply.connected")}) \u2192 ` : widget ? `${widget.value} \u2192 ` : "";
    return make("li", {}, `${titleOf(node_id, node_id)}: ${input_name} ${before}${value}`);
  });
  const disabled = asking || connected.length === changes.length;
  return make(
    "div",
    { className: "safe-plan" },
    make("h4", {}, say("apply.title")),
    make("ul", {}, ...lines),
    make(
      "button",
      { type: "button", className: "primary", onclick: apply, disabled, "data-key": "apply" },
      say("apply.button"),
    ),
  );
}

/**
 * @param {any} finding
 * @returns {HTMLElement}
 */
function nodePart(finding) {
  const id = finding.node_id;
  const made = finding.plan;
  return make(
    "details",
    { open: levelOf(finding) === "block", "data-node": id },
    make(
      "summary",
      {},
      make("span", { className: "word", "data-level": levelOf(finding) }, verdictWord(finding)),
      ` ${titleOf(id, finding.class_type)} `,
      make("small", {}, factsText(finding)),
    ),
    finding.error ? make("p", {}, finding.error) : null,
    made ? numbers(finding) : null,
    ...(finding.risks ?? []).map(riskName),
    ...(finding.changes ?? []).map((/** @type {string} */ text) => make("p", { className: "change" }, text)),
    finding.assumes?.length
      ? make("p", {}, say("plan.assumes", { what: finding.assumes.join(", ") }))
      : null,
    make(
      "button",
      { type: "button", onclick: () => showNode(id), "data-key": `show ${id}` },
      say("plan.show"),
    ),
  );
}

/**
 * @param {any} finding
 * @returns {HTMLElement}
 */
function numbers({ plan, score }) {
  const tiles = plan.tiles > 1 ? say("plan.tiles_of", { count: plan.tiles, px: plan.tile_px }) : null;
  return list([
    [say("plan.tiles"), tiles],
    [say("plan.images"), plan.images > 1 ? String(plan.images) : null],
    [say("plan.steps"), plan.steps ? String(plan.steps) : null],
    [say("plan.launches"), whole(plan.launches_total, language())],
    [say("plan.memory"), gib(plan.live_peak_bytes)],
    [say("plan.score"), score ? String(score) : null],
  ]);
}

/**
 * @param {any} risk
 * @returns {HTMLElement}
 */
function riskName(risk) {
  const title = say(`codes.${risk.code}`, {}, risk.code);
  return make("p", {}, `${say(`severity.${risk.severity}`)}: ${title} (${risk.code})`);
}

/**
 * @param {any[]} findings
 * @returns {any[]} of every risk code the first of its gravest severity, gravest first
 */
function gravestOfEach(findings) {
  const risks = findings.flatMap((finding) => finding.risks ?? []);
  const sorted = ["block", "warn", "note"].flatMap((s) => risks.filter((risk) => risk.severity === s));
  return sorted.filter((risk, at) => sorted.findIndex((r) => r.code === risk.code) === at);
}

/**
 * @param {any} risk
 * @returns {HTMLElement}
 */
function riskPart(risk) {
  const level = risk.severity === "note" ? "ok" : risk.severity;
  const title = say(`codes.${risk.code}`, {}, risk.code);
  return make(
    "div",
    { className: "risk", "data-level": level },
    make("strong", {}, `${say(`severity.${risk.severity}`)}: ${title}`),
    make("code", {}, risk.code),
    make("p", {}, risk.message),
    risk.action ? make("p", { className: "action" }, risk.action) : null,
  );
}

/**
 * @param {string[]} ids of nodes whose size is not known before they run
 * @returns {HTMLElement | null}
 */
function unknownSizes(ids) {
  if (!ids.length) return null;
  const names = ids.map((id) => titleOf(id, id)).join(", ");
  return make("p", {}, say("plan.unknown", { names }));
}
