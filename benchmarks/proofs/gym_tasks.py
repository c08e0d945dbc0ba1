"""Twenty tasks of reasoning-gym, chosen for what is hard about their entries and scorers, with short questions."""

from __future__ import annotations

GYM_TASKS: dict[str, tuple[str, ...]] = {
    "chain_sum": ("min_terms=2", "max_terms=3"),
    "gcd": (),
    "products": ("max_digits=2",),
    "letter_counting": ("max_words=6",),
    "simple_equations": (),
    "spell_backward": (),
    "word_sorting": ("max_words=5",),
    "number_sorting": ("max_numbers=6",),
    "fraction_simplification": ("styles=plain,latex_inline",),
    "base_conversion": (),
    "caesar_cipher": ("max_words=6",),
    "prime_factorization": (),
    "coin_flip": (),
    "countdown": ("max_numbers=4",),
    "knights_knaves": ("n_people=2",),
    "graph_color": ("max_num_vertices=5", "min_num_vertices=4"),
    "mini_sudoku": (),
    "game_of_life": ("grid_size_x=4", "grid_size_y=4"),
    "list_functions": (),
    "propositional_logic": (),
}
"""Task -> words of its parameters. `prime_factorization` and `coin_flip` raise exceptions for some texts, `graph_color`
and `propositional_logic` have no single right answer, `knights_knaves` has NumPy's texts, `graph_color` numbers as
keys, `mini_sudoku` answers of several lines, `list_functions` draws from the global generator, and most have tuples."""
