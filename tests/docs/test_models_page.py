"""The list of models in docs/models.md, which scripts/architectures.py writes."""

import re
import sys

from support.pages import ROOT

sys.path.append(str(ROOT / "scripts"))
import architectures

PAGE = (ROOT / "docs/models.md").read_text()


def test_the_page_has_a_place_for_the_list():
    (found,) = re.finditer(architectures.BETWEEN, PAGE)
    assert found[1].startswith("<!-- models: python scripts/architectures.py")


def test_the_list_names_every_model_once():
    text = " ".join(re.search(architectures.BETWEEN, PAGE)[0].split())
    groups = re.findall(r"(?:\*\*: |\*\* - | - )([^*]+?)(?:\.(?= \*\*| <!--)|: )", text)
    found = []
    for name in ", ".join(groups).split(", "):
        base, _, kinds = name.partition(" (also ")
        found += [base, *(f"{base} with {kind} RoPE" for kind in kinds.removesuffix(" RoPE)").split("/") if kind)]
    assert len(found) == len({*found}) == int(re.search(r"The list has (\d+) classes", text)[1])
    assert {*architectures.VARIANTS} <= {*found}


def test_the_list_joins_the_kinds_of_rope_and_sorts_by_what_poise_does():
    result, gaps = architectures.Result, {"gradient": 3e-5}
    found = architectures.listing(
        [
            result("llama with yarn RoPE", "Llama", "packed", "native", gaps=gaps),
            result("llama", "Llama", "packed", "native", gaps=gaps),
            result("mamba", "Mamba", "refused", note="Mamba: it is recurrent"),
            result("xlm", "XLM", "not tried", note="too large"),
            result("bloom", "Bloom", "padded", "transformers", gaps=gaps),
        ]
    )
    assert "5 classes and variants" in found
    assert "the largest difference was 3e-05" in " ".join(found.split())
    assert "**Packed, native engine**: llama (also yarn RoPE)." in found
    assert "**Padded, transformers' cache**: bloom." in found
    assert "- mamba: it is recurrent\n" in found
    assert "tiny versions**: xlm." in found
