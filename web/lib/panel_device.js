/** The panel's parts on the device, and on what was learned on it. */
import { list, make, section } from "./dom.js";
import { duration, gib, moment, whole } from "./format.js";
import { language, say } from "./words.js";

/**
 * @param {any} reply of `GET /supir_xpu/status`, or null
 * @param {string} problem
 * @returns {HTMLElement}
 */
export function devicePart(reply, problem) {
  if (!reply?.device) {
    return section("device", say("device.title"), make("p", {}, problem || say("plan.asking")));
  }
  const { device, profile, limits } = reply;
  const isXpu = device.kind === "xpu";
  return section(
    "device",
    say("device.title"),
    reply.simulated ? make("p", { className: "note" }, say("device.simulated")) : null,
    list([
      [say("device.name"), device.name || device.kind],
      [say("device.driver"), device.driver || null],
      [say("device.memory"), device.total_bytes ? gib(device.total_bytes) : null],
      [say("device.free"), device.free_bytes ? gib(device.free_bytes) : null],
      [say("device.profile"), profile.name ?? null],
      [say("device.gap"), limits.gap_s ? duration(limits.gap_s) : null],
    ]),
    isXpu && profile.note ? make("p", {}, profile.note) : null,
    preflightPart(reply.preflight),
    isXpu ? null : make("p", {}, say("device.other")),
  );
}

/**
 * @param {any} preflight the server's judgement of the device's health, if it makes one
 * @returns {HTMLElement | null}
 */
function preflightPart(preflight) {
  const status = preflight?.status ?? (preflight?.pending ? "pending" : null);
  if (!status && !preflight?.reason) return null;
  const words = [preflight.reason, preflight.action, ...(preflight.notes ?? [])].filter(Boolean);
  return make(
    "div",
    { "data-preflight": String(status) },
    list([[say("device.preflight"), status && say(`preflight.${status}`, {}, status)]]),
    ...words.map((text) => make("p", {}, text)),
  );
}

/**
 * @param {any} reply
 * @returns {HTMLElement[]}
 */
export function historyPart(reply) {
  if (!reply?.history) return [];
  const { last_death: death, history, journal } = reply;
  const locale = language();
  const clean = history.clean.map((/** @type {any} */ run) =>
    say("history.clean", {
      launches: whole(run.launches, locale), time: duration(run.seconds), policy: run.policy,
    }),
  ); // prettier-ignore
  const crashes = history.crashes.map((/** @type {any} */ crash) =>
    say("history.crash", {
      when: moment(crash.when, locale), phase: say(`phases.${crash.phase}`, {}, crash.phase),
      launches: whole(crash.launches, locale), driver: crash.driver,
    }),
  ); // prettier-ignore
  return [
    death ? section("death", say("death.title"), deathPart(death, locale)) : null,
    section(
      "history",
      say("history.title"),
      journal?.problem ? make("p", { className: "stall" }, journal.problem) : null,
      history.last_end ? make("p", {}, say("history.last", { when: moment(history.last_end, locale) })) : null,
      lines(clean),
      lines(crashes),
      clean.length || crashes.length ? null : make("p", {}, say("history.none")),
    ),
  ].filter((part) => part !== null);
}

/**
 * @param {any} death
 * @param {string} locale
 * @returns {HTMLElement}
 */
function deathPart(death, locale) {
  return make(
    "div",
    { className: "risk", "data-level": "block" },
    make("strong", {}, moment(death.when, locale)),
    make("p", {}, death.message),
  );
}

/**
 * @param {string[]} texts
 * @returns {HTMLElement | null}
 */
function lines(texts) {
  return texts.length ? make("ul", {}, ...texts.map((text) => make("li", {}, text))) : null;
}
