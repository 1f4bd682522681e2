"""The report's look. Series and stages are told apart in light and dark, and by people who see red and green alike."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6b7280; --grid: #e5e7eb; --back: #ffffff; --panel: #f8f9fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7e9; --soft: #9ca3af; --grid: #30343a; --back: #15171a; --panel: #1d2024; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1240px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
p { color: var(--soft); margin: .2rem 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(460px, 100%), 1fr));
  gap: 1rem; align-items: start; }
figure { margin: 0; padding: .7rem; background: var(--panel); border-radius: 8px; }
figcaption { font-weight: 600; font-size: .9rem; }
svg { width: 100%; height: auto; display: block; }
text { font-size: 10.5px; fill: var(--soft); } .middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); fill: none; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; } .thin { stroke-width: 1; opacity: .6; }
.dot { fill: var(--c); opacity: .7; } .bar { fill: var(--c); } .rule { stroke: var(--soft); stroke-dasharray: 4 3; }
.s0 { --c: #0072b2; } .s1 { --c: #e69f00; } .s2 { --c: #009e73; } .s3 { --c: #cc79a7; }
.stage-late { --c: #9ca3af; } .stage-queue { --c: #c9b458; } .stage-reserve { --c: #8c6d31; }
.stage-prefill_queue { --c: #cc79a7; } .stage-prefill { --c: #0072b2; } .stage-transfer { --c: #d55e00; }
.stage-decode_wait { --c: #56b4e9; } .stage-decode { --c: #009e73; } .stage-failed { --c: #b91c1c; }
details { margin: .4rem 0 .8rem; } summary { cursor: pointer; color: var(--soft); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; font-weight: 400; } th:first-child { text-align: left; }
.key { display: inline-block; width: .7em; height: .7em; margin-right: .4em; background: var(--c); }
"""
