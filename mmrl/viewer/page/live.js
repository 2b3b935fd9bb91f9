// News of runs that go on.

import { Problem, documents, fetched, load } from "./documents.js";
import { drawBar, drawLost, lostAt, page, redrawn } from "./frame.js";

export const POLL_MS = 3000;
const SLOW_POLLS = 5;
let polls = 0;

/** Ask for what has changed of the runs on the page; a run that has ended is asked for less often. */
async function poll() {
  polls += 1;
  try {
    const { listed } = page;
    const changed = listed ? await changedEntries() : null;
    const shown = new Set([page.run, ...page.runs].filter((each) => each !== undefined));
    const news = new Set();
    for (const run of shown) if (!changed || changed.has(run)) news.add(await refreshed(run, Boolean(changed)));
    if (lostAt) await drawLost(null);
    if (changed?.size && page.listed === listed) await listed();
    if (news.has("attempt"))
      await redrawn(); // steps on the page may have been undone
    else if (news.has("more")) {
      await page.update?.();
      await drawBar();
    }
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.mayPass && !lostAt) await drawLost(new Date());
  }
}

/** The numbers of the runs whose entry in the document of all runs has changed, which is among the documents then. */
async function changedEntries() {
  const before = await load("overview").catch(() => null);
  const after = await fetched("overview");
  const texts = (doc) => (doc?.runs ?? []).map((entry) => JSON.stringify(entry));
  const [old, own] = [texts(before), texts(after)];
  const changed = own.flatMap((text, run) => (text === old[run] ? [] : [run]));
  if (changed.length) {
    documents.set("overview", Promise.resolve(after));
    documents.delete("runs");
  }
  return new Set(changed);
}

/** The kind of news that the run has, "attempt" or "more", which are among the documents then; empty without any. */
async function refreshed(run, isSure) {
  const before = await load(`run/${run}`).catch(() => null);
  if (before && !before.live && polls % SLOW_POLLS && !isSure) return "";
  const after = await fetched(`run/${run}`);
  if (JSON.stringify(after) === JSON.stringify(before)) return "";
  const isResumed = before?.attempts?.length !== after.attempts?.length;
  const known = isResumed ? null : await documents.get(`run/${run}/metrics`)?.catch(() => null);
  for (const resource of [...documents.keys()]) {
    const isOfRun = resource.startsWith(`run/${run}/`);
    const isStep = /\/(step|(evaluation|blank)(\.[\w-]+)?)\/\d+/.test(resource);
    if (isOfRun && (isResumed || !isStep)) documents.delete(resource);
  }
  documents.set(`run/${run}`, Promise.resolve(after));
  if (known) documents.set(`run/${run}/metrics`, Promise.resolve(await longerMetrics(run, known)));
  return isResumed ? "attempt" : "more";
}

/** The metrics with the steps that came since. */
async function longerMetrics(run, before) {
  const last = before.steps.at(-1) ?? -1;
  const news = await fetched(`run/${run}/metrics?after=${last}`);
  if (news.steps.length && news.steps[0] <= last) return news;
  const curves = Object.create(null);
  for (const name of new Set([...Object.keys(before.curves), ...Object.keys(news.curves)])) {
    const of = (doc) => (Object.hasOwn(doc.curves, name) ? doc.curves[name] : doc.steps.map(() => null));
    curves[name] = [...of(before), ...of(news)];
  }
  return { steps: [...before.steps, ...news.steps], curves };
}

export async function keepPolling() {
  if (!document.hidden) await poll();
  setTimeout(keepPolling, POLL_MS);
}
