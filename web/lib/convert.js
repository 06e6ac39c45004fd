/** Turning a workflow made for older SUPIR nodes into one with ours, by the server. */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { make, section } from "./dom.js";
import { announce } from "./toasts.js";
import { say } from "./words.js";

const ROUTE = "/supir_xpu/convert";

/**
 * @param {import("./status_watch.js").StatusWatch} status
 * @param {AbortSignal} signal ends the part
 * @returns {HTMLElement} hidden until the server is known to have the route
 */
export function convertPart(status, signal) {
  const report = make("div", { className: "report", "aria-live": "polite" });
  const input = make("input", {
    type: "file", accept: ".json,application/json", hidden: true, "data-key": "convert-file",
  }); // prettier-ignore
  const choose = make(
    "button",
    { type: "button", className: "drop", onclick: () => input.click(), "data-key": "convert" },
    say("convert.drop"),
  );
  const part = section("convert", say("convert.title"), make("p", {}, say("convert.what")), choose, input, report);
  part.hidden = true;
  input.onchange = async () => {
    const file = /** @type {HTMLInputElement} */ (input).files?.[0];
    if (file) await convertFile(file, report);
    /** @type {HTMLInputElement} */ (input).value = ""; // so that the same file can be chosen again
  };
  choose.ondragover = (event) => {
    event.preventDefault();
    event.stopPropagation();
  };
  choose.ondrop = async (event) => {
    event.preventDefault();
    event.stopPropagation(); // else the front end opens the file as it is
    const file = event.dataTransfer?.files?.[0];
    if (file) await convertFile(file, report);
  };
  const show = () => {
    part.hidden = !status.state.reply?.routes?.includes(ROUTE);
  };
  status.addEventListener("change", show, { signal });
  show();
  return part;
}

/**
 * @param {string} body
 * @returns {Promise<Response>}
 */
function send(body) {
  const headers = { "Content-Type": "application/json" };
  return api.fetchApi(ROUTE, { method: "POST", headers, body });
}

/**
 * @param {any} prompt in API format, or the body of a request that queues one
 * @returns {any} the nodes by id
 */
function bareGraph(prompt) {
  const inner = prompt.prompt;
  return inner && typeof inner === "object" && !inner.class_type ? inner : prompt;
}

/**
 * @param {File} file
 * @param {HTMLElement} report where what was done is told
 */
async function convertFile(file, report) {
  report.replaceChildren(make("p", {}, say("convert.working", { name: file.name })));
  try {
    const answer = await send(await file.text());
    const reply = await answer.json().catch(() => null);
    if (!answer.ok || !reply?.workflow) {
      const why = reply?.error?.message ?? reply?.error ?? answer.statusText;
      throw new Error(String(why));
    }
    report.replaceChildren(make("p", {}, reply.report?.text ?? ""));
    const name = file.name.replace(/\.json$/i, "");
    if (reply.report?.format === "prompt") await app.loadApiJson(bareGraph(reply.workflow), name);
    else await app.loadGraphData(reply.workflow, true, true, name);
    announce("success", say("convert.done", { name: file.name }));
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    report.replaceChildren(make("p", { role: "alert" }, say("convert.failed", { name: file.name, why })));
  }
}
