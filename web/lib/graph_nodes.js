/** Finding nodes of the graph on screen, also inside subgraphs. */
import { app } from "../../../scripts/app.js";

const PREFIX = "SUPIR_XPU_";

/** @returns {any} the graph that contains all others */
function rootGraph() {
  return app.rootGraph ?? app.graph;
}

/**
 * @param {any} node
 * @returns {boolean}
 */
export function isOurs(node) {
  return String(node?.comfyClass ?? node?.type ?? "").startsWith(PREFIX);
}

/**
 * @param {any} graph
 * @returns {any[]}
 */
function nodesOf(graph) {
  return graph?.nodes ?? graph?._nodes ?? [];
}

/**
 * @param {any} [graph]
 * @returns {any[]} our nodes in a graph and in its subgraphs
 */
export function ourNodes(graph = rootGraph()) {
  return nodesOf(graph).flatMap((/** @type {any} */ node) =>
    node.subgraph ? ourNodes(node.subgraph) : isOurs(node) ? [node] : [],
  );
}

/**
 * @param {string} id of a node in an API prompt: `5`, or `12:5` for node 5 in subgraph node 12
 * @returns {any | null}
 */
export function findNode(id) {
  let graph = rootGraph();
  let node = null;
  for (const part of String(id).split(":")) {
    node = nodesOf(graph).find((/** @type {any} */ n) => String(n.id) === part) ?? null;
    graph = node?.subgraph;
  }
  return node;
}

/**
 * @param {any} node
 * @param {string} name of a widget
 * @returns {boolean} whether its value comes over a link, so that the widget's own does not count
 */
export function isConnected(node, name) {
  const inputs = node?.inputs ?? [];
  return inputs.some((/** @type {any} */ i) => (i.widget?.name ?? i.name) === name && i.link != null);
}

/**
 * @param {string} id
 * @param {string} otherwise
 * @returns {string} the title of a node
 */
export function titleOf(id, otherwise) {
  return findNode(id)?.title || otherwise;
}

/** @param {string} id of the node to bring into view and select */
export function showNode(id) {
  const node = findNode(id);
  if (!node || !app.canvas) return;
  if (node.graph && node.graph !== app.canvas.graph) app.canvas.setGraph?.(node.graph);
  app.canvas.centerOnNode?.(node);
  app.canvas.selectNode?.(node, false);
  app.canvas.setDirty(true, true);
}
