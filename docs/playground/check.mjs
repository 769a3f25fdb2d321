// Use the playground in a browser and print what happens as JSON: node check.mjs PLAYWRIGHT CHROMIUM URL [FILE.png]
import { pathToFileURL } from "node:url";

const [playwright, executablePath, url, picture] = process.argv.slice(2);
const { chromium } = await import(pathToFileURL(`${playwright}/index.mjs`));
const quiet = ["background-networking", "component-update", "sync", "gpu", "quic"];
const args = ["--no-sandbox", "--no-first-run", ...quiet.map((name) => `--disable-${name}`)];
const browser = await chromium.launch({ executablePath, args });
const context = await browser.newContext({ viewport: { width: 390, height: 844 } }); // a phone
const page = await context.newPage();
page.setDefaultTimeout(240_000);
const [requests, errors] = [[], []];
context.on("request", (request) => requests.push(request.url()));
page.on("pageerror", (error) => errors.push(String(error)));

const answered = () => page.waitForFunction(() => document.body.dataset.seconds);
const forget = () => page.evaluate(() => delete document.body.dataset.seconds);
const text = (id) => page.locator(id).innerText();
const overflow = () => page.evaluate(() => document.body.scrollWidth - document.body.clientWidth);

const started = performance.now();
await page.goto(url);
await answered();
const result = { first_seconds: (performance.now() - started) / 1000, state: await text("#state") };
result.memory = await page.locator("#memory-picture text").allTextContents();
if (picture) await page.screenshot({ path: picture });

// A key and its value are completed on a new line.
const area = page.locator("textarea");
await area.press("Control+End");
await area.pressSequentially("overl");
result.words = await page.locator(".words li b").allInnerTexts();
await area.press("Enter");
await area.pressSequentially("ba");
await forget();
await area.press("Tab");
await answered();
result.completed_state = await text("#state");
result.completed = (await area.inputValue()).trimEnd().split("\n").at(-1);

// An error is marked on its line while the old answer stays.
await area.fill((await area.inputValue()).replace("dp_shard: 8", "dp_shard: 3"));
await page.waitForSelector("#faults li");
result.fault = await text("#faults li:first-child");
result.wrong = await page.locator(".page .wrong").first().innerText();
await forget();
await area.fill((await area.inputValue()).replace("dp_shard: 3", "dp_shard: 4"));
await answered();
result.answer_seconds = Number(await page.evaluate(() => document.body.dataset.seconds));

// Pictures are as wide as the page, and follow its colours.
const sheetWidth = () => page.locator("#memory-picture svg").evaluate((svg) => svg.getBoundingClientRect().width);
const ink = () => page.locator("#memory-picture text").first().evaluate((words) => getComputedStyle(words).fill);
const resize = async (width) => {
  await forget();
  await page.setViewportSize({ width, height: 844 });
  await answered();
  return sheetWidth();
};
result.sheet_widths = [await resize(1440), await resize(390)];
result.inks = [await ink()];
await page.emulateMedia({ colorScheme: "dark" });
result.inks.push(await ink());
await page.emulateMedia({ colorScheme: "light" });

await page.click("[data-panel=placement]");
result.placement = await page.locator("#placement-picture text").allTextContents();
result.overflow = await overflow();
await page.click("[data-panel=plan]");
result.plan = await text("#plan-text");
await page.click("[data-panel=predict]");
result.predict = await text("#predict-text");
result.link = page.url();
// The page draws its frames while a worker searches.
await page.evaluate(() => {
  window.longest = 0;
  let last = performance.now();
  const beat = (now) => ((window.longest = Math.max(window.longest, now - last)), (last = now), requestAnimationFrame(beat));
  requestAnimationFrame(beat);
});
await page.click("[data-panel=select]");
const search = performance.now();
await page.waitForFunction(() => /^(?!Searching)./.test(document.getElementById("select").textContent));
result.select_seconds = (performance.now() - search) / 1000;
result.longest_frame_ms = await page.evaluate(() => window.longest);
result.select = await text("#select");

// The link alone shows the same spec.
const other = await context.newPage();
await other.goto(result.link);
await other.waitForFunction(() => document.querySelector("textarea").value);
result.is_same = (await other.inputValue("textarea")) === (await area.inputValue());
await browser.close();
const hosts = requests.map((request) => new URL(request)).filter((request) => request.protocol.startsWith("http"));
console.log(JSON.stringify({ ...result, hosts: [...new Set(hosts.map((request) => request.host))], errors }));
