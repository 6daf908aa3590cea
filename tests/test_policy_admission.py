"""What can never fit is refused with its reason."""

from __future__ import annotations

from emulator.policy import Limits, refusal


def test_each_refusal_names_its_setting() -> None:
    """What can never fit is told which capacity it exceeds; what fits is not refused."""
    limits = Limits(pe_buffer_blocks=10, de_buffer_blocks=20, de_hbm_pages=30, pe_hbm_tokens=1000)

    def ask(prompt: int, output: int, hit: int, path: str) -> str | None:
        return refusal(
            limits,
            prompt_tokens=prompt,
            output_tokens=output,
            hit_blocks=hit,
            path="pe" if path == "pe" else "de",
            block_tokens=64,
        )

    assert ask(640, 1, 10, "pe") is None
    assert "pe_buffer_gb" in (ask(800, 1, 11, "pe") or "")
    assert ask(800, 1, 11, "de") is None
    assert "pe_hbm_kv_gb" in (ask(1001, 1, 0, "de") or "")
    assert "de_buffer_gb" in (ask(64 * 20 + 1, 1, 0, "de") or "")
    assert "de_hbm_kv_gb" in (ask(640, 64 * 20 + 1, 0, "de") or "")
