"""perf.quality.slots: slots of 16, 8 and 4 bits measured in the same bytes."""

import shutil

from perf.quality.slots import LANGUAGE, LANGUAGE_MODEL, OUT, Bench, Case, Settings, write_report


def test_a_case_has_a_number_for_each_seed():
    bench = Bench(LANGUAGE_MODEL, Settings(seeds=2, context=160, continued=2), asks=False)
    plain, same, more = (
        bench.run(Case(LANGUAGE, "snapkv", 48, slots, same))
        for slots, same in (("auto", False), ("int8", True), ("int8", False))
    )
    assert plain["kept"] == same["kept"] < more["kept"]
    assert same["bytes"] < more["bytes"] <= plain["bytes"]
    for row in (plain, same, more):
        assert len(row["kl"]) == len(row["error"]) == 2 and min(row["error"]) > 0


def test_the_page_is_written_from_the_results(tmp_path):
    for file in OUT.glob("*.json"):
        shutil.copy(file, tmp_path)
    write_report(tmp_path)
    assert (tmp_path / "README.md").read_text() == (OUT / "README.md").read_text()
