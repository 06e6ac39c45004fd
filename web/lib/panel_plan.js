/** The panel's part on the plan: verdict, every node, every risk, and the safe plan. */
import { factsText, levelOf, verdictWord } from "./badges.js";
import { list, make, section } from "./dom.js";
import { about, duration, gib, whole } from "./format.js";
import { findNode, showNode, titleOf } from "./graph_nodes.js";
import { language, say } from "./words.js";

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
  return section(
    "plan",
    say("plan.title"),
    verdict(reply),
    totals(reply),
    safePlan(reply.safe_plan ?? [], actions.apply),
    ...gravestOfEach(nodes).map(riskPart),
    make("h4", {}, say("plan.nodes")),
    ...nodes.map(nodePart),
    unknownSizes(reply.size_unknown ?? []),
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
  const detail = say(reply.refused ? "plan.refused" : `plan.${level}`);
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
 * @returns {HTMLElement | null}
 */
function safePlan(changes, apply) {
  if (!changes.length) return null;
  const lines = changes.map(({ node_id, input_name, value }) => {
    const widget = findNode(node_id)?.widgets?.find((/** @type {any} */ w) => w.name === input_name);
    const before = widget ? `${widget.value} \u2192 ` : "";
    return make("li", {}, `${titleOf(node_id, node_id)}: ${input_name} ${before}${value}`);
  });
  return make(
    "div",
    { className: "safe-plan" },
    make("h4", {}, say("apply.title")),
    make("ul", {}, ...lines),
    make(
      "button",
      { type: "button", className: "primary", onclick: apply, "data-key": "apply" },
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
