/** Making elements. Text is always set as text, never as markup. */

/**
 * @param {string} tag
 * @param {Record<string, any>} [props] properties of the element; `aria-*` and `data-*` as attributes
 * @param {...(Node | string | null | undefined | false)} children
 * @returns {HTMLElement}
 */
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-")) element.setAttribute(name, String(value));
    else /** @type {any} */ (element)[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * @param {[string, string | Node | null][]} rows name and value; rows without a value are left out
 * @returns {HTMLElement}
 */
export function list(rows) {
  const parts = rows
    .filter(([, value]) => value !== null && value !== "")
    .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  return make("dl", {}, ...parts);
}

/**
 * @param {string} id
 * @param {string} title
 * @param {...(Node | string | null | false)} children
 * @returns {HTMLElement}
 */
export function section(id, title, ...children) {
  return make("section", { "data-section": id }, make("h3", {}, title), ...children);
}
