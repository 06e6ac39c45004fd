/** The pack's words in the user's language, from `locales/` by way of ComfyUI's `/i18n`. */
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const FALLBACK = "en";
/** @type {Record<string, any>} */
let translations = {};

/** Fetch the words once; without them, keys are shown. */
export async function loadWords() {
  try {
    const reply = await api.fetchApi("/i18n");
    if (reply.ok) translations = await reply.json();
  } catch {
    // The server is gone for now: keys are shown until the page is loaded again.
  }
}

/** @returns {string} ComfyUI's language, such as `en` or `zh`. */
export function language() {
  return String(app.extensionManager?.setting?.get("Comfy.Locale") ?? FALLBACK);
}

/**
 * @param {string} locale
 * @param {string} key path below `supirXpu`, with dots
 * @returns {string | undefined}
 */
function find(locale, key) {
  let at = translations[locale]?.supirXpu;
  for (const part of key.split(".")) at = at?.[part];
  return typeof at === "string" ? at : undefined;
}

/**
 * Say something in the user's language; `{name}` in the words takes the value of that name.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 * @param {string} [otherwise] said where no language has the key
 * @returns {string}
 */
export function say(key, values = {}, otherwise = key) {
  const words = find(language(), key) ?? find(FALLBACK, key) ?? otherwise;
  return words.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}
