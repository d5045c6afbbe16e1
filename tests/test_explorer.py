"""Protects docs/explorer.html: its mathematics is that of the scripts, and in a browser it shows what it computes.

The first needs node, the second Chromium with its driver and docs/benchmark/requirements-explorer.txt.
"""

import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import ROOT
from scipy.stats import chi2

import ersac_epinet as epinet
import ersac_tabular as tabular

PAGE = ROOT / "docs" / "explorer.html"
ANSWER = """
  const answers = JSON.parse(require("fs").readFileSync(0)).map((hash) => {
    const view = read(hash), q = critics(view), sets = setsOf(view, q), rows = {};
    for (const [key, set] of Object.entries(sets)) {
      const inside = set.holds ? q.filter(set.holds).length / q.length : null;
      rows[key] = [...set.worst(policyOf(view.p)), valueOf(set, view.p), set.radius ?? null, inside, bestPolicy(set)];
    }
    return { view, q, rows, charges: chainCharges(view) };
  });
  console.log(JSON.stringify(answers));
"""
TABLE = """
  const rows = [...document.querySelectorAll("#rows tr[id]:not([hidden])")];
  const number = (cell) => (cell.value === "" ? null : Number(cell.value));
  return Object.fromEntries(rows.map((row) => [row.id.slice(4), [...row.querySelectorAll("data")].map(number)]));
"""


def compute(addresses):
    """What the page's script computes at each of many addresses, without drawing."""
    node = shutil.which("node")
    if not node:
        pytest.skip("no node")
    (script,) = re.findall(r"<script>(.*?)// ===== Drawing", PAGE.read_text(), re.DOTALL)
    asked = json.dumps(["#" + "&".join(f"{key}={x}" for key, x in words.items()) for words in addresses])
    done = subprocess.run([node, "-e", script + ANSWER], input=asked, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def difference(row, worst, p):
    """How far a row is from the scripts: q*, the value, and the best of many policies. worst(pi [B, 2]) -> [B, 2]"""
    q1, q2, value, _, _, best = row
    grid = torch.tensor([p, best, *np.linspace(0, 1, 501)], dtype=torch.float64)
    pi = torch.stack([1 - grid, grid], -1)
    q_star = worst(pi)
    values = (pi * q_star).sum(-1)
    found = [q1 - q_star[0, 0], q2 - q_star[0, 1], value - values[0], max(values.max() - values[1] - 1e-9, 0.0)]
    return max(abs(float(x)) for x in found)


def sample_sets(q, upsilon):
    """The sets around critics [N, 2] as ersac_tabular.py has them."""

    def many(pi):
        return torch.tensor(q)[:, None].expand(-1, len(pi), -1)

    return {
        "mean": lambda pi: many(pi).mean(0),
        "box": lambda pi: tabular.worst_case_box(many(pi), pi),
        "hull": lambda pi: tabular.worst_case_hull(many(pi), pi),
        "ellipsoid": lambda pi: tabular.worst_case_ellipsoid(many(pi), pi, upsilon),
    }


def ensembles(count):
    """Critics of many shapes, [N, 2], with a policy and upsilon: few, many, correlated, on a line, identical."""
    rng = np.random.default_rng(0)
    for i in range(count):
        N = int(rng.choice([1, 2, 3, 4, 5, 10, 25, 30, 40, 100, 200]))
        p = float(rng.choice([0, 1, 0.5, rng.random()]))
        upsilon = float(rng.choice([1, 0.9, 0.5, 0.28, 0.1, rng.uniform(0.05, 1)]))
        root = rng.normal(size=(2, 2)) * 10 ** rng.uniform(-2, 0.3)
        q = rng.normal(size=(N, 2)) @ root + rng.uniform(-2, 2, 2)
        if i % 10 == 0:
            q[:] = q[0]  # all critics agree
        elif i % 10 == 1:
            q, p = q[:, :1] * [1, -0.7] + [0.3, 1], 0.2  # on a line
        elif i % 10 == 2:
            q[:, i // 10 % 2] = 0.25  # no spread at one action
        yield np.clip(q, -20, 20), p, upsilon


# ----- the mathematics
def test_200_ensembles_agree_with_ersac_tabular():
    cases = list(ensembles(200))
    moved = [";".join(f"{i},{float(x)!r},{float(y)!r}" for i, (x, y) in enumerate(q)) for q, _, _ in cases]
    answers = compute([dict(n=len(q), p=p, upsilon=u, moved=m) for (q, p, u), m in zip(cases, moved)])
    for (q, p, upsilon), answer in zip(cases, answers, strict=True):
        assert np.array_equal(answer["q"], q) and answer["rows"].keys() == {"mean", "box", "hull", "ellipsoid"}
        for key, worst in sample_sets(q, upsilon).items():
            assert difference(answer["rows"][key], worst, p) < 1e-6, (key, len(q))


def test_the_gaussian_mode_agrees_with_ersac_epinet():
    rng = np.random.default_rng(1)
    cases = []
    for i in range(100):
        case = {"p": [0, 1, rng.random()][i % 3], "upsilon": rng.uniform(0.05, 0.99), "seed": int(rng.integers(10**9))}
        case |= {"m1": rng.uniform(-2, 2), "m2": rng.uniform(-2, 2), "s1": rng.uniform(0.1, 2), "s2": rng.uniform(0, 2)}
        case |= {"a1": rng.uniform(-180, 180), "a2": rng.uniform(-180, 180)}
        if i % 10 == 0:
            case["a2"] = case["a1"]  # errors that are one and the same
        cases.append({key: float(x) for key, x in case.items()} | {"n": [3, 50, 200][i % 3], "mode": "gaussian"})
    for case, answer in zip(cases, compute(cases), strict=True):
        rows, q, p = answer["rows"], np.array(answer["q"]), case["p"]
        angle = torch.tensor([case["a1"], case["a2"]], dtype=torch.float64) * math.pi / 180
        length = torch.tensor([[case["s1"]], [case["s2"]]], dtype=torch.float64)
        sigma_bar = length * torch.stack([angle.cos(), angle.sin()], -1)  # [A, d_z]
        mu, radius = (
            torch.tensor([case["m1"], case["m2"]], dtype=torch.float64),
            math.sqrt(chi2.ppf(case["upsilon"], 2)),
        )
        sets = {"gaussian": epinet.worst_case_gaussian, "bounds": epinet.worst_case_gaussian_box}
        for key, formula in sets.items():

            def worst(pi, formula=formula, mu=mu, sigma_bar=sigma_bar, radius=radius):
                return formula(mu.expand(len(pi), 2), sigma_bar.expand(len(pi), 2, 2), pi, radius)

            assert difference(rows[key], worst, p) < 1e-9 and abs(rows[key][3] - radius) < 1e-9, key
        if abs(torch.linalg.det(sigma_bar)) > 1e-3:  # the points are samples mu + sigma_bar z, counted by |z|
            z = np.linalg.solve(sigma_bar.numpy(), (q - mu.numpy()).T)
            assert rows["gaussian"][4] == pytest.approx(np.mean((z**2).sum(0) <= radius**2))
        assert difference(rows["ellipsoid"], sample_sets(q, case["upsilon"])["ellipsoid"], p) < 1e-6


def test_the_chain_charges_what_own_and_shared_targets_charge():
    rng = np.random.default_rng(2)
    cases = [dict(gamma=0.99, agree=0, sigma=1, radius=1), dict(gamma=0.9, agree=1, sigma=0.5, radius=2)]
    cases += [dict(gamma=rng.uniform(0, 0.99), agree=rng.random(), sigma=2 * rng.random(), radius=3) for _ in range(8)]
    for case, answer in zip(cases, compute(cases), strict=True):
        gamma, radius = case["gamma"], case["radius"]
        values, vectors = np.linalg.eigh(case["agree"] + (1 - case["agree"]) * np.eye(10))  # any arrows at these angles
        steps = torch.tensor(case["sigma"] * vectors * np.sqrt(values.clip(0))).double()
        # one action: its own targets carry the spread back, a shared one what the set charges
        end, pi, zero = torch.zeros(1).double(), torch.ones(1, 1).double(), torch.zeros(1, 1).double()
        spread, shared, own_charges, shared_charges = torch.zeros(1, 1, 10).double(), 0.0, [], []
        for step in steps.flip(0):
            spread = epinet.propagated_spread(end, pi, spread, gamma)[:, None] + step
            own_charges.insert(0, -epinet.worst_case_gaussian(zero, spread, pi, radius).item())
            shared = gamma * shared - epinet.worst_case_gaussian(zero, step[None, None], pi, radius).item()
            shared_charges.insert(0, shared)
        assert answer["charges"]["own"] == pytest.approx(own_charges)
        assert answer["charges"]["shared"] == pytest.approx(shared_charges)


# ----- the page
def test_one_file_that_needs_nothing_else():
    text = PAGE.read_text()
    assert not re.search(r"https?:|src=|@import|fetch\(|XMLHttp|import ", text)
    for name, anchor in re.findall(r'href="(\w+\.md)#?([\w-]*)"', text):
        headings = re.findall(r"^#+ (.*)", (PAGE.parent / name).read_text(), re.M)
        assert anchor in ["", *(re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings)]


def test_in_a_browser_it_shows_what_it_computes():
    """An address, a slider and a dragged point change the table, and nothing is written to the console."""
    pytest.importorskip("selenium", reason="pip install -r docs/benchmark/requirements-explorer.txt")
    from selenium import webdriver
    from selenium.webdriver.common.keys import Keys

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))

    def shown():
        view, q = browser.execute_script("return [view, critics(view)];")
        cells = browser.execute_script(TABLE)
        for key, worst in sample_sets(np.array(q, float), view["upsilon"]).items():
            assert difference(cells[key], worst, view["p"]) < 1e-6
        return view

    try:
        browser.get(PAGE.as_uri() + "#p=0.35&n=30&upsilon=0.6")
        view = shown()
        assert (view["n"], view["upsilon"]) == (30, 0.6)
        browser.find_element("id", "p").send_keys(Keys.ARROW_RIGHT)
        assert shown()["p"] == pytest.approx(0.36)
        point = browser.find_elements("css selector", ".critic")[0]
        webdriver.ActionChains(browser).click_and_hold(point).move_by_offset(30, -20).release().perform()
        assert len(shown()["moved"]) == 1
        assert browser.get_log("browser") == []
    finally:
        browser.quit()
