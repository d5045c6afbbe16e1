"""Protects the copies: scripts import nothing from each other; what they share is a twin, word for word."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLANNED = ("ersac_tabular", "ersac_ensemble", "ersac_epinet", "ersac_atari", "gen_expectile_data")
SCRIPTS = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}  # a contributor's copy, too
TABULAR, ENSEMBLE, EPINET, ATARI, GEN = PLANNED
ASSIGNED = {
    "worst_case_box": (TABULAR, ENSEMBLE, EPINET, ATARI),
    "worst_case_hull": (TABULAR, ENSEMBLE, EPINET, ATARI),
    "worst_case_ellipsoid": (TABULAR, ENSEMBLE, EPINET, ATARI),
    "worst_case_gaussian": (EPINET, ATARI),
    "robust_target": (TABULAR, ENSEMBLE, EPINET, ATARI),
    "critic_loss": (ENSEMBLE, ATARI),
    "actor_loss": (TABULAR, ENSEMBLE, EPINET, ATARI),
    "ensemble_similarity": (ENSEMBLE,),
    "epinet_loss": (EPINET, ATARI),
    "expectile": (GEN, TABULAR),
    "EnsembleCritic": (ENSEMBLE,),
    "EpinetCritic": (EPINET,),
    "Actor": (ENSEMBLE, EPINET),
    "propagated_spread": (EPINET,),
    "worst_case_gaussian_box": (EPINET,),
    "machine_replacement": (TABULAR,),
    "riverswim": (TABULAR,),
}


def definitions(source):
    """Whole lines of every top-level function and class, by name, comments included. Args is each script's own."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    lines = source.splitlines()
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes if node.name != "Args"}


def drifted(scripts):
    """Names that two scripts define differently."""
    versions = {}
    for source in scripts.values():
        for name, text in definitions(source).items():
            versions.setdefault(name, set()).add(text)
    return sorted(name for name, texts in versions.items() if len(texts) > 1)


def lacking(scripts):
    """(script, function) pairs that the design assigns and the script does not define."""
    return [
        (s, name)
        for name, where in ASSIGNED.items()
        for s in where
        if s in scripts and name not in definitions(scripts[s])
    ]


def test_twins_are_word_for_word_the_same():
    assert drifted(SCRIPTS) == []


def test_every_script_has_the_functions_assigned_to_it():
    assert lacking(SCRIPTS) == []


def test_this_test_can_fail():
    ours = SCRIPTS[TABULAR]
    assert drifted({TABULAR: ours, ENSEMBLE: ours.replace("return q.amin(0)", "return q.amax(0)")}) == [
        "worst_case_box"
    ]
    assert lacking({TABULAR: ours.replace("def expectile(", "def expectil(")}) == [(TABULAR, "expectile")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_import_nothing_from_each_other_and_document_every_argument(name):
    tree = ast.parse(SCRIPTS[name])
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & set(PLANNED)
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    for item, after in zip(args.body, [*args.body[1:], None]):
        if isinstance(item, ast.AnnAssign):
            assert isinstance(after, ast.Expr) and isinstance(after.value.value, str), item.target.id
