/** Numbers as people read them. Pure functions. */

/**
 * @param {number} seconds
 * @returns {string} such as `45 s`, `12 min`, `1.5 h`
 */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "?";
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/**
 * @param {number} seconds predicted
 * @returns {string} such as `\u2248 45 s`
 */
export function about(seconds) {
  return seconds < 1 ? "< 1 s" : `\u2248 ${duration(seconds)}`;
}

/**
 * @param {number} bytes
 * @returns {string} in GiB
 */
export function gib(bytes) {
  return `${(bytes / 2 ** 30).toFixed(1)} GiB`;
}

/**
 * @param {[number, number]} size width and height
 * @returns {string}
 */
export function pixels(size) {
  return `${size[0]}\u00d7${size[1]} px`;
}

/**
 * @param {number} count
 * @param {string} locale
 * @returns {string}
 */
export function whole(count, locale) {
  return Math.round(count).toLocaleString(locale);
}

/**
 * @param {number | null | undefined} when seconds since 1970
 * @param {string} locale
 * @returns {string}
 */
export function moment(when, locale) {
  return when ? new Date(when * 1000).toLocaleString(locale) : "?";
}
