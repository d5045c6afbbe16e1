"""docs/explorer.html in a real browser: its numbers are those of the scripts, and a reader can move what it shows.

Needs Chromium with its driver and docs/benchmark/requirements-explorer.txt; without them all but one test are skipped.
"""

import math
import re
import shutil
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from scipy.spatial import ConvexHull
from scipy.stats import chi2

import ersac_epinet as epinet
import ersac_tabular as tabular

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explorer.html"
COLUMNS = ("q1", "q2", "value", "radius", "inside", "best")
READ = """
  const rows = {};
  for (const row of document.querySelectorAll("#rows tr[id]:not([hidden])")) {
    const cells = [...row.querySelectorAll("data")];
    rows[row.id.slice(4)] = cells.map((cell) => (cell.value === "" ? null : Number(cell.value)));
  }
"""
LOOKS = """
  const pictures = ["plane", "value", "rows", "chain", "charges"].map((id) => document.getElementById(id).innerHTML);
  return [...pictures, ...[...document.querySelectorAll("input")].map((input) => input.value + input.checked)];
"""
START = {"p": 0.35, "upsilon": 0.9, "n": 40, "rho": 0.3, "a1": 0, "a2": 60, "m1": 0.2, "m2": 0, "s1": 1, "s2": 0.9}
START |= {"sigma": 1, "gamma": 0.95, "agree": 0, "radius": 2.15}


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, 1280 by 900 points."""
    pytest.importorskip(
        "selenium", reason="selenium is missing: pip install -r docs/benchmark/requirements-explorer.txt"
    )
    from selenium import webdriver

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no browser: the explorer's tests need chromium and chromedriver (apt: chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser):
    """The page as a reader first sees it; at the end of every test the console must be empty."""
    resize(browser, 1280, 900)
    browser.get("about:blank")
    browser.get(PAGE.as_uri())
    yield browser
    assert browser.get_log("browser") == []


def resize(browser, width, height, touch=False, **media):
    """Size and kind of the screen, and what the reader prefers, such as prefers_color_scheme="dark"."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
    features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def named(rows):
    return {key: dict(zip(COLUMNS, numbers)) for key, numbers in rows.items()}


def table(page):
    """The numbers beside the picture, in full: {"box": {"q1": ...}, ...}."""
    return named(page.execute_script(READ + "return rows;"))


def view(page):
    return page.execute_script("return view;")


def points(page):
    """The critics that the page works with, [N, 2]."""
    return np.array(page.execute_script("return critics(view);"))


def show(page, addresses):
    """The table and the critics at each of many addresses, without the browser's limit on navigations."""
    script = "return arguments[0].map((hash) => { change(read(hash));" + READ + "return [rows, critics(view)]; });"
    return [(named(rows), np.array(q)) for rows, q in page.execute_script(script, addresses)]


def address(**words):
    return "#" + "&".join(f"{key}={value}" for key, value in words.items())


def moved(q):
    return ";".join(f"{i},{float(x)!r},{float(y)!r}" for i, (x, y) in enumerate(q))


def worst_cases(q, p, upsilon):
    """q* of the sets around the critics q [N, 2] for policies p [B], each [B, 2], by ersac_tabular.py."""
    pi = torch.stack([1 - p, p], -1)
    many = torch.tensor(q)[:, None].expand(-1, len(p), -1)
    return pi, {
        "mean": many.mean(0),
        "box": tabular.worst_case_box(many, pi),
        "hull": tabular.worst_case_hull(many, pi),
        "ellipsoid": tabular.worst_case_ellipsoid(many, pi, upsilon),
    }


def differences(row, q, p, upsilon, key):
    """How far a row of the table is from ersac_tabular.py: q*, value, radius, share inside, and the best policy."""
    grid = torch.tensor([p, row["best"], *np.linspace(0, 1, 501)], dtype=torch.float64)
    pi, worst = worst_cases(q, grid, upsilon)
    value = (pi * worst[key]).sum(-1)
    found = [row["q1"] - worst[key][0, 0].item(), row["q2"] - worst[key][0, 1].item(), row["value"] - value[0].item()]
    found.append(max(value.max().item() - value[1].item() - 1e-9, 0.0))  # the 501 policies of the grid are no better
    d = tabular.center(torch.tensor(q)[:, None])[1]
    if key == "ellipsoid":
        radius = tabular.ellipsoid_radius(d, upsilon).item()
        inside = (tabular.mahalanobis(d, d) <= radius**2 * (1 + 1e-9)).double().mean().item()
        found += [row["radius"] - radius, row["inside"] - inside]
    else:
        assert row["radius"] is None
        assert row["inside"] == (None if key == "mean" else 1)
    return np.abs(found).max()


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
            q = q[:, :1] * [1, -0.7] + [0.3, 1]  # on a line
            p = rng.uniform(0.1, 0.3)
        elif i % 10 == 2:
            q[:, i // 10 % 2] = 0.25  # no spread at one action
            p = rng.uniform(0.1, 0.9)
        elif i % 10 == 3:
            q = q[rng.integers(N, size=N)]  # some critics twice
        yield np.clip(q, -20, 20), float(p), upsilon


def test_one_small_file_that_needs_nothing_else():
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 450
    assert not re.search(r"https?:|src=|@import|fetch\(|XMLHttp|import ", text)
    for name, anchor in re.findall(r'href="(\w+\.md)#?([\w-]*)"', text):
        headings = re.findall(r"^#+ (.*)", (PAGE.parent / name).read_text(), re.M)
        assert anchor in ["", *(re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings)]


def test_200_ensembles_agree_with_ersac_tabular(page):
    cases = list(ensembles(200))
    shown = show(page, [address(n=len(q), p=p, upsilon=upsilon, moved=moved(q)) for q, p, upsilon in cases])
    worst = {}
    for (q, p, upsilon), (rows, drawn) in zip(cases, shown):
        assert np.array_equal(drawn, q)
        assert set(rows) == {"mean", "box", "hull", "ellipsoid"}
        for key, row in rows.items():
            worst[key] = max(worst.get(key, 0), differences(row, q, p, upsilon, key))
    print("largest difference:", worst)
    assert max(worst.values()) < 1e-9


def test_the_gaussian_mode_agrees_with_ersac_epinet(page):
    rng = np.random.default_rng(1)
    cases = []
    for i in range(200):
        case = {"mode": "gaussian", "n": int(rng.choice([1, 2, 3, 10, 50, 200])), "seed": int(rng.integers(10**9))}
        case |= {"p": [0, 1, rng.random()][i % 3], "upsilon": rng.uniform(0.05, 0.99)}
        case |= {"m1": rng.uniform(-2, 2), "m2": rng.uniform(-2, 2), "s1": rng.uniform(0, 2), "s2": rng.uniform(0, 2)}
        case |= {"a1": rng.uniform(-180, 180), "a2": rng.uniform(-180, 180)}
        if i % 10 == 0:
            case["a2"] = case["a1"]  # errors that are one and the same
        if i % 10 == 1:
            case["s1"] = 0.0
        cases.append({key: x if isinstance(x, str) else float(x) for key, x in case.items()})
    largest = {}
    for case, (rows, q) in zip(cases, show(page, [address(**case) for case in cases])):
        assert set(rows) == {"mean", "ellipsoid", "gaussian", "bounds"}
        p, upsilon, mu = case["p"], case["upsilon"], torch.tensor([[case["m1"], case["m2"]]], dtype=torch.float64)
        angle = torch.tensor([case["a1"], case["a2"]], dtype=torch.float64) * math.pi / 180
        length = torch.tensor([[case["s1"]], [case["s2"]]], dtype=torch.float64)
        sigma_bar = length * torch.stack([angle.cos(), angle.sin()], -1)  # [A, d_z]
        radius = math.sqrt(chi2.ppf(upsilon, 2))
        best = [rows[key]["best"] for key in ("gaussian", "bounds")]
        grid = torch.tensor([p, *best, *np.linspace(0, 1, 501)], dtype=torch.float64)
        pi = torch.stack([1 - grid, grid], -1)
        for at, (key, formula) in enumerate(
            {"gaussian": epinet.worst_case_gaussian, "bounds": epinet.worst_case_gaussian_box}.items(), 1
        ):
            q_star = formula(mu.expand(len(pi), 2), sigma_bar.expand(len(pi), 2, 2), pi, radius)
            value, row = (pi * q_star).sum(-1), rows[key]
            found = [
                row["q1"] - q_star[0, 0],
                row["q2"] - q_star[0, 1],
                row["value"] - value[0],
                row["radius"] - radius,
            ]
            found.append(max(value.max() - value[at] - 1e-9, 0))
            largest[key] = max(largest.get(key, 0), *(abs(float(x)) for x in found))
        if abs(torch.linalg.det(sigma_bar)) > 1e-3:
            z = np.linalg.solve(sigma_bar.numpy(), (q - mu.numpy()).T)
            assert abs(rows["gaussian"]["inside"] - np.mean((z**2).sum(0) <= radius**2)) < 1e-9
        inside = (np.abs(q - mu.numpy()) <= radius * length.numpy().T + 1e-12).all(-1).mean()
        assert case["s1"] == 0 or abs(rows["bounds"]["inside"] - inside) < 1e-9
        for key in ("mean", "ellipsoid"):
            largest[key] = max(largest.get(key, 0), differences(rows[key], q, p, upsilon, key))
    print("largest difference:", largest)
    assert max(largest.values()) < 1e-9


def test_the_points_are_drawn_from_what_the_sliders_say(page):
    unit = address(mode="gaussian", n=200, m1=0, m2=0, s1=1, s2=1, a1=0, a2=90)
    shown = show(page, [f"{unit}&seed={seed}" for seed in range(50)])
    z = np.concatenate([q for _, q in shown])  # [10000, 2]
    assert np.abs(z.mean(0)).max() < 0.04
    assert np.abs(z.T @ z / len(z) - np.eye(2)).max() < 0.05
    assert abs((z**4).mean() - 3) < 0.3
    first = shown[7][1]
    words = {"n": 30, "seed": 7, "m1": 0.5, "m2": -1, "s1": 0.6, "s2": 1.4}
    (_, arrows), (_, critics) = show(
        page, [address(mode="gaussian", a1=30, a2=-75, **words), address(rho=-0.6, **words)]
    )
    angle = np.radians([30, -75])
    sigma_bar = np.array([[0.6], [1.4]]) * np.stack([np.cos(angle), np.sin(angle)], -1)
    assert np.allclose(arrows, [0.5, -1] + first[:30] @ sigma_bar.T, atol=1e-12)  # N only adds points
    assert np.allclose(critics, [0.5, -1] + first[:30] @ (np.array([[0.6, 0], [-0.84, 1.12]])).T, atol=1e-12)


def test_the_sampled_ellipsoid_comes_close_to_the_closed_form(page):
    gaps = {}
    for n in (5, 200):
        shown = show(page, [address(mode="gaussian", n=n, seed=seed, upsilon=0.9) for seed in range(40)])
        gaps[n] = np.mean([abs(rows["ellipsoid"]["value"] - rows["gaussian"]["value"]) for rows, _ in shown])
    assert gaps[200] < 0.12 < 3 * gaps[200] < gaps[5]


def charges(page):
    return [float(cell.get_attribute("value")) for cell in page.find_elements("css selector", "#charges data")]


def test_the_chain_charges_what_own_and_shared_targets_charge(page):
    rng = np.random.default_rng(2)
    cases = [dict(gamma=0.99, agree=0, sigma=1, radius=1), dict(gamma=0.9, agree=1, sigma=0.5, radius=2)]
    cases += [dict(gamma=rng.uniform(0, 0.99), agree=rng.random(), sigma=2 * rng.random(), radius=3) for _ in range(8)]
    for case in cases:
        show(page, [address(**{key: float(x) for key, x in case.items()})])
        gamma, radius = case["gamma"], case["radius"]
        cosines = case["agree"] + (1 - case["agree"]) * np.eye(10)
        values, vectors = np.linalg.eigh(cosines)
        steps = torch.tensor(case["sigma"] * vectors * np.sqrt(values.clip(0))).double()  # any arrows with these angles
        # one action: its own targets carry the spread back, a shared one what the set charges
        end, pi = torch.zeros(1).double(), torch.ones(1, 1).double()
        spread, shared = torch.zeros(1, 1, 10).double(), 0.0
        heights = {"own": [], "shared": []}
        for step in steps.flip(0):
            spread = epinet.propagated_spread(end, pi, spread, gamma)[:, None] + step
            heights["own"].insert(0, -epinet.worst_case_gaussian(torch.zeros(1, 1).double(), spread, pi, radius).item())
            alone = epinet.worst_case_gaussian(torch.zeros(1, 1).double(), step[None, None], pi, radius).item()
            shared = gamma * shared - alone
            heights["shared"].insert(0, shared)
        k = np.arange(5000)
        endless = [gamma**k, math.sqrt(1 - case["agree"]), math.sqrt(case["agree"])]
        own = radius * case["sigma"] * np.hypot(endless[1] * np.linalg.norm(endless[0]), endless[2] * endless[0].sum())
        expected = [heights["own"][0], heights["shared"][0], own, radius * case["sigma"] * endless[0].sum()]
        assert np.allclose(charges(page), expected, rtol=1e-9, atol=1e-12)
        bars = page.execute_script(
            "return [...document.querySelectorAll('#chain path[fill]')].map((x) => x.getBBox().height)"
        )
        assert len(bars) == 20
        scale = bars[1] / heights["shared"][0]
        assert np.allclose(bars[::2], scale * np.array(heights["own"]), atol=0.03)
        assert np.allclose(bars[1::2], scale * np.array(heights["shared"]), atol=0.03)
    show(page, [address(gamma=0.99, radius=1)])
    assert [round(x) for x in charges(page)[2:]] == [7, 100]  # the numbers of docs/ersac_epinet.md


def drawn(page, where, kind):
    """Values of what is drawn, read off the axes: the corners of each outline, or the place of each mark."""
    script = """
      const svg = document.getElementById(arguments[0]);
      const text = [...svg.querySelectorAll("text")].map((x) => [Number(x.textContent.replace("−", "-")), x]);
      const spot = (x) => x.transform.baseVal[0].matrix;
      const labels = text.filter(([v]) => !Number.isNaN(v)).map(([v, x]) => [v, spot(x).e, spot(x).f]);
      const paths = [...svg.querySelectorAll("path." + arguments[1])].map((x) => {
        const corners = x.getAttribute("d").match(/[-.0-9]+,[-.0-9]+/g);
        return [x.dataset.set, arguments[1] === "outline" ? corners : [`${spot(x).e},${spot(x).f}`]];
      });
      return [labels, paths];
    """
    labels, paths = page.execute_script(script, where, kind)
    labels = np.array(labels)
    left = labels[:, 1] == labels[:, 1].min()  # the vertical axis; its numbers are centred 4 below their line
    y = np.polyfit(labels[left, 2] - 4, labels[left, 0], 1)
    x = np.polyfit(labels[~left, 1], labels[~left, 0], 1)
    values = {}
    for key, corners in paths:
        at = np.array([corner.split(",") for corner in corners], float)
        values[key] = np.stack([np.polyval(x, at[:, 0]), np.polyval(y, at[:, 1])], -1)
    return values


@pytest.mark.parametrize("where", ["#p=0.2&n=25", "#p=0.7&n=25&mode=gaussian"])
def test_the_pictures_show_the_numbers(page, where):
    ((rows, q),) = show(page, [where])
    p, upsilon = view(page)["p"], view(page)["upsilon"]
    for key, place in drawn(page, "plane", "mark").items():
        assert np.allclose(place[0], [rows[key]["q1"], rows[key]["q2"]], atol=0.01)
    for key, place in drawn(page, "value", "mark").items():
        assert np.allclose(place[0], [p, rows[key]["value"]], atol=0.01)
    curves = drawn(page, "value", "outline")
    assert set(curves) == set(rows)
    for key, place in drawn(page, "value", "best").items():
        assert abs(place[0, 0] - rows[key]["best"]) < 0.01
        assert abs(place[0, 1] - curves[key][:, 1].max()) < 0.01
    grid = torch.linspace(0, 1, 101).double()
    pi, worst = worst_cases(q, grid, upsilon)
    for key in set(worst) & set(rows):
        assert np.allclose(curves[key], np.stack([grid, (pi * worst[key]).sum(-1)], -1), atol=0.01)
    outlines = drawn(page, "plane", "outline")
    mu, d = tabular.center(torch.tensor(q)[:, None])
    ring = tabular.mahalanobis((torch.tensor(outlines["ellipsoid"]) - mu).T[None], d)[0].sqrt()
    assert np.allclose(ring, rows["ellipsoid"]["radius"], atol=0.03)
    assert len(np.unique(outlines["ellipsoid"].round(2), axis=0)) > 100
    if "box" in rows:
        assert np.allclose([outlines["box"].min(0), outlines["box"].max(0)], [q.min(0), q.max(0)], atol=0.01)
        assert math.isclose(ConvexHull(outlines["hull"]).volume, ConvexHull(q).volume, rel_tol=0.02)
    else:
        assert np.allclose(outlines["bounds"].min(0), outlines["gaussian"].min(0), atol=0.01)
        assert np.allclose(outlines["bounds"].max(0), outlines["gaussian"].max(0), atol=0.01)


def centre(page, i):
    """Where critic i is on the screen, and how many points of the screen a value of 1 takes."""
    script = """
      const { left, top, width } = document.querySelectorAll(".critic")[arguments[0]].getBoundingClientRect();
      const plane = document.getElementById("plane").getBoundingClientRect();
      return [left + width / 2, top + width / 2, 336 * (plane.width / 400) / (2 * limit)];
    """
    return page.execute_script(script, i)


def loneliest(q):
    distance = np.linalg.norm(q[:, None] - q, axis=-1) + 99 * np.eye(len(q))
    return int(distance.min(0).argmax())


def eventually(check):
    """The address follows what the reader does with a short delay."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(None, 3, poll_frequency=0.05).until(lambda _: check())


def mouse(page, start, *moves):
    """A mouse that is pressed at a place and then moved; what it does next is up to the caller."""
    from selenium.webdriver.common.action_chains import ActionChains

    actions = ActionChains(page, duration=20)
    actions.w3c_actions.pointer_action.move_to_location(*map(round, start))
    actions.click_and_hold()
    for move in moves:
        actions.move_by_offset(*move)
    return actions


def test_a_critic_can_be_dragged_with_the_mouse(page):
    show(page, [address(upsilon=1)])
    before = points(page)
    i = loneliest(before)
    x, y, scale = centre(page, i)
    mouse(page, (x, y), (-40, -30), (-20, -20)).perform()
    during = points(page)
    assert np.allclose(during[i] - before[i], [-60 / scale, 50 / scale], atol=1.5 / scale)
    assert np.array_equal(np.delete(during, i, 0), np.delete(before, i, 0))
    mouse(page, centre(page, i)[:2], (-200, 0), (-280, 380)).perform()
    assert np.allclose(points(page)[i], [-3, -3], atol=0.01)  # it stays between the axes, and they stand still
    assert centre(page, i)[2] == scale
    assert page.switch_to.active_element.accessible_name.startswith(f"point {i + 1} at")
    mouse(page, (20, 20)).release().move_by_offset(200, 400).perform()
    after = points(page)
    assert np.allclose(after[i], [-3, -3], atol=0.01)  # released is released
    assert centre(page, i)[2] < 0.8 * scale  # now the axes make room for the ellipsoid
    assert np.array_equal(np.delete(after, i, 0), np.delete(before, i, 0))
    for key, row in table(page).items():
        assert differences(row, after, 0.35, 1.0, key) < 1e-9
    eventually(lambda: f"moved={i},{after[i, 0]:g},{after[i, 1]:g}" in page.current_url)


def test_of_two_points_the_nearer_one_is_dragged(page):
    show(page, [address(n=2, moved="0,0,0;1,0.1,0")])
    x, y, scale = centre(page, 0)
    mouse(page, (x - 1, y), (-30, 0)).release().perform()
    assert np.allclose(points(page), [[-31 / scale, 0], [0.1, 0]], atol=1.5 / scale)
    mouse(page, (20, y), (200, 0)).release().perform()  # beside the points nothing happens
    assert np.allclose(points(page), [[-31 / scale, 0], [0.1, 0]], atol=1.5 / scale)


def touch(page, path):
    for kind, at in zip(["touchStart"] + ["touchMove"] * (len(path) - 1), path):
        spot = [{"x": round(at[0]), "y": round(at[1])}]
        page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": spot})
    page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_touch_on_a_phone(page):
    resize(page, 390, 844, touch=True)
    page.execute_script("document.getElementById('plane').scrollIntoView({ block: 'center' });")
    before = points(page)
    i = loneliest(before)
    x, y, scale = centre(page, i)
    scrolled = page.execute_script("return scrollY;")
    touch(page, [(x, y), (x, y + 20), (x - 10, y + 40), (x - 10, y + 60)])
    assert np.allclose(points(page)[i] - before[i], [-10 / scale, -60 / scale], atol=1.5 / scale)
    assert page.execute_script("return scrollY;") == scrolled
    page.execute_script("document.getElementById('value').scrollIntoView({ block: 'center' });")
    box = page.execute_script("return document.getElementById('value').getBoundingClientRect();")
    middle = (box["left"] + box["right"]) / 2, (box["top"] + box["bottom"]) / 2
    touch(page, [(middle[0] + dx, middle[1]) for dx in (0, 30, 60, 90)])
    assert abs(view(page)["p"] - (400 * (middle[0] + 90 - box["left"]) / box["width"] - 54) / 336) < 0.01
    scrolled = page.execute_script("return scrollY;")
    touch(page, [(middle[0], middle[1] - dy) for dy in (0, 40, 80, 120, 160)])  # up and down scrolls the page
    eventually(lambda: page.execute_script("return scrollY;") > scrolled + 50)
    assert points(page)[i].tolist() == view(page)["moved"][str(i)]


def test_the_policy_can_be_dragged_along_the_curves(page):
    box = page.execute_script("return document.getElementById('value').getBoundingClientRect();")
    place = {p: round(box["left"] + box["width"] * (54 + 336 * p) / 400) for p in (0.25, 0.8)}
    start = place[0.25], box["top"] + 200
    mouse(page, start).perform()
    assert abs(view(page)["p"] - 0.25) < 0.003
    mouse(page, start, (place[0.8] - place[0.25], 30)).perform()
    assert abs(view(page)["p"] - 0.8) < 0.003
    mouse(page, start, (450, 90)).release().move_by_offset(
        -300, 0
    ).perform()  # beyond the end, and on after the release
    assert view(page)["p"] == 1
    assert differences(table(page)["hull"], points(page), 1.0, 0.9, "hull") < 1e-9


def test_every_slider_has_a_name_a_number_and_an_effect(page):
    from selenium.webdriver.common.keys import Keys

    show(page, [address(n=150)])
    seen = set()
    for mode in ("critics", "gaussian"):
        page.find_element("css selector", f"[value={mode}]").click()
        assert view(page)["mode"] == mode
        for slider in page.find_elements("css selector", "input[type=range]"):
            if slider.is_displayed():
                key, before, picture = slider.get_attribute("id"), view(page), page.execute_script(LOOKS)[:5]
                slider.send_keys(Keys.ARROW_LEFT if key == "upsilon" else Keys.ARROW_RIGHT)
                after, step = view(page), float(slider.get_attribute("step"))
                change = -step if key == "upsilon" else step
                assert math.isclose(after[key], before[key] + change, abs_tol=1e-9)
                assert {**after, key: 0} == {**before, key: 0}
                assert slider.accessible_name and slider.aria_role == "slider"
                label = slider.find_element("xpath", "..").text
                assert label.endswith(f"{after[key]:g}") and len(label) > 8
                assert page.execute_script(LOOKS)[:5] != picture, key
                seen.add(key)
    assert seen == set(START)


def test_resample_draws_new_points_and_lets_go_of_the_moved_ones(page):
    show(page, [address(moved="0,1,1")])
    before = points(page)
    page.find_element("id", "resample").click()
    after = points(page)
    assert len(after) == len(before) and not np.isclose(after, before).any()
    assert view(page)["moved"] == {}
    eventually(lambda: f"seed={view(page)['seed']}" in page.current_url)


def test_the_keyboard_alone_moves_points(page):
    from selenium.webdriver.common.keys import Keys

    start = points(page)
    for _ in range(20):
        page.switch_to.active_element.send_keys(Keys.TAB)
        if page.switch_to.active_element.get_attribute("class") == "critic":
            break
    focus = page.switch_to.active_element
    assert focus.accessible_name.startswith("point 1 at")
    for key, step in ((Keys.ARROW_RIGHT, [0.05, 0]), (Keys.ARROW_UP, [0, 0.05]), (Keys.ARROW_LEFT, [-0.05, 0])):
        before = points(page)
        page.switch_to.active_element.send_keys(key)
        assert np.allclose(points(page)[0] - before[0], step, atol=0.0011)
    page.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert np.allclose(points(page)[0] - start[0], [0, -0.05], atol=0.0011)
    page.switch_to.active_element.send_keys(Keys.PAGE_DOWN)
    assert page.switch_to.active_element.accessible_name.startswith("point 2 at")
    assert list(view(page)["moved"]) == ["0"]  # to choose a point is not to move it
    page.switch_to.active_element.send_keys(Keys.PAGE_UP, Keys.PAGE_UP)
    assert page.switch_to.active_element.accessible_name.startswith("point 40 at")
    page.switch_to.active_element.send_keys(Keys.ARROW_UP)
    assert np.allclose(points(page)[39] - start[39], [0, 0.05], atol=0.0011)
    page.switch_to.active_element.send_keys(Keys.TAB)
    assert page.switch_to.active_element.get_attribute("id") == "p"  # one stop for all points
    show(page, [address(n=2)])
    assert page.execute_script("return document.querySelectorAll('.critic[tabindex=\"0\"]:not([hidden])').length;") == 1


def preset(page, name):
    link = page.find_element("link text", name)
    link.click()
    words = {key: value[0] for key, value in parse_qs(link.get_attribute("href").split("#")[1]).items()}
    eventually(lambda: all(str(view(page)[key]) == value for key, value in words.items() if key != "moved"))
    sentence = page.find_element("id", "sentence").text
    assert len(sentence) > 60 and sentence == " ".join(link.get_attribute("title").split())
    return table(page), sentence


def test_presets_show_what_they_say(page):
    rows, _ = preset(page, "Few critics")
    assert view(page)["n"] == 10 and view(page)["p"] == 0 and view(page)["upsilon"] == 0.9
    assert rows["ellipsoid"]["value"] < rows["box"]["value"] - 0.1
    rows, _ = preset(page, "The idea")
    assert rows["box"]["best"] in (0, 1) and rows["mean"]["best"] in (0, 1)
    assert 0.2 < rows["hull"]["best"] < 0.8 and 0.2 < rows["ellipsoid"]["best"] < 0.8
    assert rows["box"]["value"] < rows["hull"]["value"] - 0.2
    rows, _ = preset(page, "One action")
    assert rows["box"]["value"] == rows["hull"]["value"] == points(page)[:, 1].min()
    rows, _ = preset(page, "Three critics")
    radii = [here["ellipsoid"]["radius"] for here, _ in show(page, [f"#p=0.5&n=3&upsilon={u}" for u in (0.05, 0.5, 1)])]
    assert np.allclose([rows["ellipsoid"]["radius"], *radii], math.sqrt(2), atol=1e-6)
    rows, _ = preset(page, "Correlated errors")
    charge = {key: rows["mean"]["value"] - rows[key]["value"] for key in ("box", "hull")}
    assert charge["hull"] <= charge["box"] < 1.06 * charge["hull"]
    rows, _ = preset(page, "An outlier")
    ((tamed, _),) = show(page, ["#upsilon=0.9&moved=0,-3,2.5"])
    assert rows["ellipsoid"]["inside"] == 1 and rows["ellipsoid"]["radius"] > 1.5 * tamed["ellipsoid"]["radius"]
    assert rows["ellipsoid"]["value"] < tamed["ellipsoid"]["value"] - 0.3
    rows, _ = preset(page, "Epinet")
    ((few, _),) = show(page, ["#n=10&mode=gaussian"])
    near, far = (abs(x["ellipsoid"]["value"] - x["gaussian"]["value"]) for x in (rows, few))
    assert near < 0.1 < 0.25 < far
    rows, _ = preset(page, "Bounding box")
    assert math.isclose(rows["gaussian"]["value"], rows["bounds"]["value"], rel_tol=1e-12)
    ((mixed, _),) = show(page, ["#p=0.5&mode=gaussian"])
    assert mixed["bounds"]["value"] < mixed["gaussian"]["value"] - 0.1
    assert len(page.find_elements("css selector", "#presets a")) == 8


def test_the_address_holds_the_view(page):
    from selenium.webdriver.common.keys import Keys

    page.find_element("id", "rho").send_keys(Keys.ARROW_LEFT)
    page.find_element("id", "gamma").send_keys(Keys.ARROW_LEFT)
    page.execute_script("change(moved(4, [0.125, -1.5]));")
    page.find_element("css selector", "[value=gaussian]").click()
    page.find_element("id", "a2").send_keys(Keys.ARROW_LEFT)
    eventually(lambda: "mode=gaussian" in page.current_url)
    assert page.current_url.endswith("#rho=0.29&a2=55&gamma=0.94&mode=gaussian&moved=4,0.125,-1.5")
    before, url = page.execute_script(LOOKS), page.current_url
    page.get("about:blank")
    page.get(url)
    assert page.execute_script(LOOKS) == before
    page.execute_script("location.hash = '#n=7&upsilon=0.6';")  # an address typed into the open page
    eventually(lambda: len(points(page)) == 7)
    assert view(page)["upsilon"] == 0.6 and view(page)["moved"] == {}
    page.back()
    eventually(lambda: view(page)["mode"] == "gaussian")
    for link in page.find_elements("css selector", "#presets a")[1:]:  # the address of an example stays what it is
        href = link.get_attribute("href").split("#")[1]
        assert page.execute_script("return address(read(arguments[0]));", "#" + href) == "#" + href
    page.find_element("link text", "The idea").click()
    eventually(lambda: page.current_url.endswith("#"))
    assert {key: view(page)[key] for key in START} == START


def test_a_broken_address_still_shows_a_page(page):
    addresses = [
        "#n=abc&p=&upsilon=NaN",
        "#n=-5&p=7&upsilon=0",
        "#n=1e9&p=-1",
        "#%E0%A4%A",
        "#moved=;;1,2;x,y,z;3,1,1e9",
    ]
    addresses += ["#mode=other&n=3.7", "#mode=gaussian&upsilon=1", "#moved=-1,2,2;0.5,1,1;999,0,0;__proto__,1,1"]
    for where, (rows, q) in zip(addresses, show(page, addresses)):
        assert all(math.isfinite(x) for row in rows.values() for x in row.values() if x is not None), where
        assert 1 <= len(q) <= 200 and np.abs(q).max() < 20
    (default, low, high, *_, other, gaussian, _) = (
        page.execute_script("return read(arguments[0]);", x) for x in addresses
    )
    assert {key: default[key] for key in START} == START
    assert (low["n"], low["p"], low["upsilon"]) == (1, 1, 0.05) and (high["n"], high["p"]) == (200, 0)
    assert other["mode"] == "critics" and other["n"] == 4
    ((rows, _),) = show(page, ["#mode=gaussian&upsilon=1"])
    assert math.isclose(rows["gaussian"]["radius"], math.sqrt(chi2.ppf(0.99, 2)))


def contrast(colours):
    """Of two colours such as rgb(0, 0, 0), by the formula of the WCAG."""
    light = []
    for colour in colours:
        c = np.array([int(x) for x in re.findall(r"\d+", colour)[:3]]) / 255
        light.append(np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])
    return (max(light) + 0.05) / (min(light) + 0.05)


@pytest.mark.parametrize("width,height", [(1280, 900), (390, 844), (320, 600)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_can_be_read(page, width, height, scheme):
    resize(page, width, height, prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    for where in ("#p=0.35", "#n=200&mode=gaussian&s1=2&s2=2", "#n=3&m1=-2&gamma=0.99&sigma=2&radius=4"):
        show(page, [where])
        assert page.execute_script("return document.documentElement.scrollWidth;") <= width
        svgs = """
          const box = (x) => [x.left, x.top, x.right, x.bottom];
          return [...document.querySelectorAll("body > div > figure > svg")].map((svg) =>
            [svg, ...svg.querySelectorAll("text")].map((x) => box(x.getBoundingClientRect())));
        """
        for svg, *labels in page.execute_script(svgs):
            for i, (left, top, right, bottom) in enumerate(labels):
                assert svg[0] - 1 <= left and svg[1] - 3 <= top and right <= svg[2] + 1 and bottom <= svg[3] + 1
                for other in labels[:i]:
                    apart = (
                        right <= other[0] + 1 or other[2] <= left + 1 or bottom <= other[1] + 3 or other[3] <= top + 3
                    )
                    assert apart, (where, labels[i], other)
    style = "const s = (id, name) => getComputedStyle(document.querySelector(id))[name]; return "
    paper, ink, label, panel, link = page.execute_script(
        style
        + "[s('body', 'backgroundColor'), s('p', 'color'), s('svg text', 'fill'), s('fieldset', 'backgroundColor'),"
        "s('nav a', 'color')];"
    )
    assert min(contrast([paper, ink]), contrast([panel, ink]), contrast([panel, link])) > 7
    assert contrast([paper, label]) > 4.5
    assert (contrast([paper, "rgb(0, 0, 0)"]) < 2) == (scheme == "dark")
    for colour in ("rgb(0, 158, 115)", "rgb(0, 114, 178)", "rgb(213, 94, 0)", "rgb(204, 121, 167)"):
        assert contrast([paper, colour]) > 2.9
    assert page.execute_script("return document.getAnimations().length;") == 0  # nothing moves by itself
    assert page.execute_script("return performance.getEntriesByType('resource').length;") == 0  # no network


def test_colours_are_those_of_the_figures(page):
    palette = (PAGE.parent / "benchmark" / "figures.py").read_text()
    blue, orange, green, purple, grey = re.search(r"BLUE, ORANGE.*?= (.*?)  #", palette)[1].replace('"', "").split(", ")
    colours = page.execute_script(
        "return Object.fromEntries(Object.entries(SETS).map(([key, set]) => [key, set.colour]));"
    )
    expected = {"mean": grey, "box": green, "hull": blue, "ellipsoid": orange, "gaussian": purple, "bounds": purple}
    assert colours == expected
