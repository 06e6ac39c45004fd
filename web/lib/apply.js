/** Setting widgets to values the server named. */
import { app } from "../../../scripts/app.js";
import { findNode, isConnected } from "./graph_nodes.js";

/**
 * @typedef {{node_id: string, input_name: string, value: any}} Change
 */

/**
 * Set widgets as a user would, in one step that can be undone.
 * @param {Change[]} changes
 * @returns {Change[]} those whose widget was not found, or takes its value from a connection
 */
export function applyChanges(changes) {
  const missed = changes.filter((change) => !setWidget(change));
  app.canvas?.setDirty(true, true);
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  // Called checkState up to front end 1.44, then captureCanvasState.
  (tracker?.captureCanvasState ?? tracker?.checkState)?.call(tracker);
  return missed;
}

/**
 * @param {Change} change
 * @returns {boolean} whether there was such a widget, and it counts
 */
function setWidget({ node_id, input_name, value }) {
  const node = findNode(node_id);
  const widget = node?.widgets?.find((/** @type {any} */ w) => w.name === input_name);
  if (!widget || isConnected(node, input_name)) return false;
  const before = widget.value;
  widget.value = value;
  widget.callback?.(value, app.canvas, node, node.pos);
  node.onWidgetChanged?.(input_name, value, before, widget);
  return true;
}
