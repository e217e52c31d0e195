"""The page's style sheet, for light and dark screens and for paper."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c2330;--soft:#5a6472;--line:#e3e6eb;--lapis:#1d3fb8;--tint:#f4f6fb;--bad:#9b2c1f}
@media screen and (prefers-color-scheme:dark){:root{--bg:#0d1117;--ink:#e3e8ef;--soft:#9aa5b3;--line:#262d37;--lapis:#8eacff;--tint:#141b27;--bad:#f0938a}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,'Segoe UI','Helvetica Neue',Arial,sans-serif}
main,header,footer{max-width:1240px;margin:0 auto;padding:0 20px}
header{padding-top:40px}
h1{font-size:clamp(1.5rem,1.1rem + 1.8vw,2.2rem);line-height:1.2;margin:0 0 .5rem;max-width:34ch;text-wrap:balance;letter-spacing:-.01em}
header p{color:var(--soft);max-width:85ch;margin:.4rem 0}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:1.2rem 0 0;padding:.7rem 0;border-top:1px solid var(--line);border-bottom:1px solid var(--line);font-size:.9rem}
a{color:var(--lapis);text-decoration:none}a:hover{text-decoration:underline}
section{padding:2.2rem 0 .6rem;border-bottom:1px solid var(--line)}
section:last-child{border:0}
.topic{margin:0;color:var(--lapis);font-size:.85rem;font-weight:600}
h2{font-size:clamp(1.12rem,1rem + .6vw,1.4rem);line-height:1.3;margin:.1rem 0 .7rem;max-width:60ch;text-wrap:balance}
.note{color:var(--soft);font-size:.9rem;max-width:85ch;margin:.4rem 0 1rem}
section>p{max-width:85ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));gap:12px;margin:1rem 0 1.4rem}
.tile{background:var(--tint);border-left:3px solid var(--lapis);padding:.8rem 1rem;border-radius:0 4px 4px 0;display:flex;flex-direction:column;gap:.15rem}
.tile b{font-size:1.9rem;line-height:1.1;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{font-size:.9rem;line-height:1.35}.tile i{font-style:normal;color:var(--soft);font-size:.82rem;margin-top:auto;padding-top:.25rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:1.6rem 2.2rem;margin:1rem 0 1.4rem}
.figures.three{grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));column-gap:1.8rem}
figure,.beside{margin:0;min-width:0;max-width:540px;grid-row:span 2}
@supports (grid-template-rows:subgrid){figure{display:grid;grid-template-rows:subgrid;row-gap:0}.figures{row-gap:0}.figures figure{margin-bottom:1.7rem}}
figcaption{align-self:end;font-size:.93rem;line-height:1.35;font-weight:600;margin-bottom:.5rem;max-width:62ch}
figure svg{display:block;width:100%;height:auto;overflow:visible}
.scroll{overflow-x:auto;margin:.6rem 0 1.2rem;max-width:100%}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;line-height:1.3}
table.wide{width:100%}
th,td{padding:.38rem .6rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line);white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal;min-width:4.6em;line-height:1.25}
tbody th{font-weight:500}
.name{text-align:left}
th.name{position:sticky;left:0;background:var(--bg)}
tr.group th{text-align:left;color:var(--soft);font-weight:600;padding-top:1em;font-size:.95em;white-space:normal}
tr.group span{position:sticky;left:.6rem}
td small{display:block;color:var(--soft);font-size:.87em;font-weight:400}
td.best,td.strong{font-weight:700}
.failed,td small.failed{color:var(--bad)}
.failures,details{font-size:.86rem;color:var(--soft)}.failures{margin:.3rem 0;padding-left:1.2rem;overflow-wrap:anywhere}
pre{background:var(--tint);padding:.8rem 1rem;overflow-x:auto;font-size:.84rem;border-radius:4px}
footer{color:var(--soft);font-size:.85rem;padding-bottom:40px}
@media (max-width:520px){main,header,footer{padding-left:14px;padding-right:14px}header{padding-top:22px}table{font-size:.82rem}th,td{padding:.34rem .45rem}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:.6rem .7rem}.tile b{font-size:1.45rem}.tile span{font-size:.82rem}table.images th.name,table.wide th.name{max-width:118px;white-space:normal}}
@media print{body{font-size:10pt}.scroll{overflow:visible}figure,tr,.tile{break-inside:avoid}h2,.topic,figcaption,thead{break-after:avoid}nav{display:none}
table{font-size:7.5pt}th,td{padding:2pt 3pt;white-space:normal}th.name{position:static}section{padding-top:14pt}.figures,.figures.three{grid-template-columns:1fr 1fr;column-gap:16pt}
.tiles{grid-template-columns:repeat(4,1fr)}.tile b{font-size:16pt}h1{font-size:20pt}h2{font-size:13pt}tr.group{break-after:avoid}}
"""
