/** The panel's part on the run that goes on. */
import { make, section } from "./dom.js";
import { duration } from "./format.js";
import { say } from "./words.js";

/**
 * @param {import("./progress.js").RunProgress} progress
 * @returns {HTMLElement[]} nothing while nothing of ours runs
 */
export function runPart(progress) {
  const state = progress.state;
  if (!state.node && !state.waiting && !state.checking) return [];
  const parts = [];
  if (state.waiting) {
    const left = Math.ceil(state.rest);
    parts.push(make("p", { className: "rest" }, say("run.resting", { seconds: left })));
  }
  if (state.checking && !state.node) parts.push(make("p", {}, state.checking));
  if (state.node) {
    const left = progress.secondsLeft();
    const time = left === null ? say("run.longer") : say("run.left", { time: duration(left) });
    const phase = say(`phases.${state.phase}`, {}, state.phase);
    const at = { node: state.node, phase, index: state.index + 1, count: state.count };
    parts.push(
      make("p", {}, say("run.phase", at)),
      make("progress", { max: 1, value: state.part, "aria-label": phase }),
      make("p", {}, time),
    );
  }
  if (state.stall) parts.push(make("p", { className: "stall", role: "alert" }, state.stall));
  return [section("run", say("run.title"), ...parts)];
}
