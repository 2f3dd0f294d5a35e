// Draws the charts of a job with uPlot. Each finds its numbers in the element behind it.
"use strict";
(() => {
  const HEIGHT = 190;
  const TIMES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];
  const drawn = new Map();

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function short(value) {
    if (value === null || value === undefined) return "";
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return (value / size).toFixed(value / size < 10 ? 1 : 0).replace(/\.0$/, "") + " " + unit;
    }
    if (value % 1 === 0 || Math.abs(value) >= 10) return String(Math.round(value));
    return value.toFixed(Math.abs(value) < 1 ? 2 : 1).replace(/(\.\d)0$/, "$1");
  }

  function clock(seconds) {
    if (seconds >= 86400) return (seconds / 86400).toFixed(1).replace(/\.0$/, "") + " d";
    if (seconds >= 3600) return (seconds / 3600).toFixed(1).replace(/\.0$/, "") + " h";
    if (seconds >= 60) return (seconds / 60).toFixed(1).replace(/\.0$/, "") + " min";
    return seconds.toFixed(seconds < 10 && seconds % 1 ? 1 : 0) + " s";
  }

  function axis(values, more) {
    const line = { stroke: colour("--chart-grid"), width: 1 };
    return Object.assign({
      stroke: colour("--soft"), grid: line, ticks: line, size: 46,
      font: "12px system-ui, sans-serif", values: (plot, ticks) => ticks.map(values),
    }, more);
  }

  function filled(name) {
    return colour(name) + "33";
  }

  const steps = () => uPlot.paths.stepped({ align: 1 });

  function counted(label, name) {
    return {
      label, stroke: colour(name), fill: filled(name), width: 1.5, points: { show: false }, paths: steps(),
      value: (plot, value) => short(value),
    };
  }

  const makers = {
    speed(data, width) {
      return [{
        width, height: HEIGHT,
        scales: { x: { time: false }, y: { range: (plot, low, high) => [0, high * 1.1 || 1] }, rows: { range: (plot, low, high) => [0, high || 1] } },
        axes: [axis(clock, { size: 32, space: 70, incrs: TIMES }), axis(short), axis(short, { scale: "rows", side: 1, grid: { show: false } })],
        series: [
          { label: "Since the first claim", value: (plot, value) => value === null ? "" : clock(value) },
          { label: "Rows a second", stroke: colour("--chart-a"), fill: filled("--chart-a"), width: 1.5, points: { show: false }, paths: uPlot.paths.stepped({ align: -1 }), value: (plot, value) => short(value) },
          { label: "Rows landed", scale: "rows", stroke: colour("--chart-b"), width: 2, points: { show: false }, value: (plot, value) => short(value) },
        ],
      }, [data.seconds, data.rates, data.rows]];
    },
    lengths(data, width) {
      const last = (values) => values.concat([values[values.length - 1]]);
      return [{
        width, height: HEIGHT,
        scales: { x: { time: false }, y: { range: (plot, low, high) => [0, high * 1.1 || 1] } },
        axes: [axis(short, { size: 32 }), axis(short)],
        series: [
          { label: "Tokens", value: (plot, value) => short(value) },
          counted("Requested", "--chart-a"),
          counted("Generated", "--chart-b"),
        ],
      }, [data.edges, last(data.requested), last(data.generated)]];
    },
    prompts(data, width) {
      return [{
        width, height: HEIGHT, padding: [22, 30, 0, null], // room for the buckets' labels
        scales: { x: { time: false }, y: { range: (plot, low, high) => [0, high * 1.1 || 1] } },
        axes: [axis(short, { size: 32 }), axis(short)],
        series: [
          { label: "Tokens", value: (plot, value) => short(value) },
          counted("Rows", "--chart-a"),
        ],
        hooks: { draw: [(plot) => bucketLines(plot, data.buckets)] },
      }, [data.prompt_edges, data.prompts.concat([data.prompts[data.prompts.length - 1]])]];
    },
  };

  function bucketLines(plot, buckets) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--stage-c");
    ctx.fillStyle = colour("--soft");
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    // Above the plot, from the largest bucket down: labels that would overlap are left out.
    let free = Infinity;
    for (const bucket of [...buckets].reverse()) {
      const x = plot.valToPos(bucket, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const text = "≤ " + bucket.toLocaleString("en");
      const half = ctx.measureText(text).width / 2;
      if (x + half <= free) {
        ctx.fillText(text, x, bbox.top - 4 * devicePixelRatio);
        free = x - half - 6 * devicePixelRatio;
      }
    }
    ctx.restore();
  }

  function draw(place) {
    const told = place.nextElementSibling;
    if (!told || told.type !== "application/json") return;
    drawn.get(place)?.destroy();
    const [options, numbers] = makers[place.dataset.chart](JSON.parse(told.textContent), place.clientWidth);
    drawn.set(place, new uPlot(options, numbers, place));
  }

  function drawAll() {
    for (const place of drawn.keys()) if (!place.isConnected) { drawn.get(place).destroy(); drawn.delete(place); }
    document.querySelectorAll("[data-chart]").forEach(draw);
  }

  document.addEventListener("htmx:after:swap", (event) => {
    if (event.target.id === "figures" || event.target.querySelector?.("#figures")) drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 150);
  });
})();
