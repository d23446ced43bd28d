"""Which engine samples for a model."""

import pytest

from poise.models.policy import ModelError
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.choose import choose
from poise.sampling.native.engine import NativeEngine, supports
from support.native_engines import NATIVE
from support.tiny_models import ARCHITECTURES, tiny


class TestChoice:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_which_models_can_use_it(self, name):
        assert supports(tiny(name)) == (name in NATIVE)

    def test_a_model_that_cannot_gets_the_other_engine_and_is_told(self):
        said = []
        policy = tiny("gemma2")
        assert type(choose(tiny("llama"), note=said.append)) is NativeEngine
        assert not said
        assert type(choose(policy, note=said.append)) is CachedEngine
        assert len(said) == 1
        assert "Gemma2" in said[0]
        with pytest.raises(ModelError, match="auto"):
            choose(policy, "native")
        assert type(choose(tiny("llama"), "native", note=said.append)) is NativeEngine
        assert type(choose(tiny("llama"), "transformers", note=said.append)) is CachedEngine
        assert len(said) == 1

    def test_a_layer_that_decodes_differently_is_found_out(self, monkeypatch):
        from poise.sampling.native.kv_cache import SharedPromptCache

        right = SharedPromptCache.attend
        monkeypatch.setattr(SharedPromptCache, "attend", lambda self, layer, *rest: right(self, layer, *rest) * 1.01)
        assert not supports(tiny("llama"))
