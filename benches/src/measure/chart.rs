//! A chart of lines: as a CSV file with all points, and as an SVG image.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::Context;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 480.0;
/// The rectangle of the lines: left, top, right, bottom. The legend is on its right.
const FRAME: (f64, f64, f64, f64) = (80.0, 40.0, 640.0, 420.0);
const COLOURS: [&str; 12] = [
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
    "#17becf", "#000000", "#ffbb78",
];

/// A chart of lines. The scale of the vertical axis is logarithmic.
#[derive(Debug)]
pub struct Chart {
    /// The title of the chart.
    pub title: String,
    /// The label of the horizontal axis. The axis has one position for each x value that occurs. The positions have
    /// equal distances.
    pub x_label: String,
    /// The label of the vertical axis, with the unit.
    pub y_label: String,
    /// The lines of the chart. Each line has a name and a list of points `(x, y)`.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Chart {
    /// Writes the points of this chart to `DIRECTORY/NAME.csv`, and an image of the chart to `DIRECTORY/NAME.svg`.
    /// DIRECTORY is `directory`, and NAME is `name`.
    ///
    /// # Errors
    /// If the directory can't be created, or if a file can't be written.
    pub fn write(&self, directory: &Path, name: &str) -> anyhow::Result<()> {
        fs::create_dir_all(directory).with_context(|| format!("can't make {}", directory.display()))?;
        for (extension, text) in [("csv", self.csv()), ("svg", self.svg())] {
            let path = directory.join(format!("{name}.{extension}"));
            fs::write(&path, text).with_context(|| format!("can't write {}", path.display()))?;
        }
        Ok(())
    }

    fn csv(&self) -> String {
        let mut text = format!("line,{},{}\n", quoted(&self.x_label), quoted(&self.y_label));
        for (name, points) in &self.lines {
            for (x, y) in points {
                let _ = writeln!(text, "{},{x},{y}", quoted(name));
            }
        }
        text
    }

    /// Draws the chart as SVG. The y axis is logarithmic, and points with y = 0 or less are left out. On the x axis,
    /// the x values of all points are in order and at equal distances.
    fn svg(&self) -> String {
        let (left, top, right, bottom) = FRAME;
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let mut x_values: Vec<f64> = points().map(|(x, _)| *x).collect();
        x_values.sort_by(f64::total_cmp);
        x_values.dedup();
        let decades = points().map(|(_, y)| *y).filter(|y| *y > 0.0).map(f64::log10);
        // Without a positive value, the axis begins at 1.
        let lowest = decades.clone().map(f64::floor).min_by(f64::total_cmp).unwrap_or(0.0);
        let highest = decades.map(f64::ceil).fold(lowest + 1.0, f64::max);
        let step = (right - left) / x_values.len().max(2).saturating_sub(1) as f64;
        let x_of = |x: f64| left + step * x_values.iter().take_while(|value| **value < x).count() as f64;
        let y_of = |y: f64| bottom - (y.log10() - lowest) / (highest - lowest) * (bottom - top);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <path d=\"M{left} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>\n"
        );
        let middle = f64::midpoint(left, right);
        label(&mut svg, (middle, top - 16.0), "middle", &self.title);
        label(&mut svg, (middle, bottom + 40.0), "middle", &self.x_label);
        label(&mut svg, (left - 70.0, top - 16.0), "start", &self.y_label);
        for x in &x_values {
            label(&mut svg, (x_of(*x), bottom + 18.0), "middle", &x.to_string());
        }
        let mut decade = lowest;
        while decade <= highest {
            let (value, y) = (10_f64.powf(decade), y_of(10_f64.powf(decade)));
            let _ = writeln!(svg, "<path d=\"M{left} {y:.1}H{right}\" stroke=\"#dddddd\"/>");
            label(&mut svg, (left - 6.0, y + 4.0), "end", &value.to_string());
            decade += 1.0;
        }
        for (number, (name, points)) in self.lines.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let corners: Vec<String> = points
                .iter()
                .filter(|(_, y)| *y > 0.0)
                .map(|(x, y)| format!("{:.1},{:.1}", x_of(*x), y_of(*y)))
                .collect();
            let path = corners.join(" ");
            let _ = writeln!(
                svg,
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
            );
            let y = top + 20.0 * number as f64;
            let _ = writeln!(
                svg,
                "<path d=\"M{} {y}h20\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                right + 12.0
            );
            label(&mut svg, (right + 38.0, y + 4.0), "start", name);
        }
        svg + "</svg>\n"
    }
}

fn label(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

fn quoted(text: &str) -> String {
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.into() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn chart() -> Chart {
        let (title, x_label, y_label) = ("a < b".into(), "processes".into(), "us, CPU".into());
        let lines = vec![("one".into(), vec![(1.0, 10.0), (100.0, 1000.0)]), ("two, half".into(), vec![])];
        Chart { title, x_label, y_label, lines }
    }

    #[test]
    fn the_csv_file_has_a_line_for_each_point() {
        assert_eq!(chart().csv(), "line,processes,\"us, CPU\"\none,1,10\none,100,1000\n");
    }

    #[test]
    fn an_image_without_a_positive_value_has_the_axis_from_1_to_10() {
        let lines = vec![("one".into(), vec![(1.0, 0.0)])];
        let svg = Chart { lines, ..chart() }.svg();
        assert!(
            svg.contains(">1</text>") && svg.contains(">10</text>") && !svg.contains(">100</text>"),
            "{svg}"
        );
    }

    #[test]
    fn twelve_lines_have_twelve_colours() {
        // The bench `spawn` draws twelve lines: one for each way to start processes.
        let lines = (0..12).map(|number| (number.to_string(), vec![(1.0, 10.0)])).collect();
        let svg = Chart { lines, ..chart() }.svg();
        let lines = svg.lines().filter(|line| line.starts_with("<polyline"));
        let colours: BTreeSet<&str> = lines.filter_map(|line| line.split("stroke=\"").nth(1)).collect();
        assert_eq!(colours.len(), 12, "{svg}");
    }

    #[test]
    fn a_line_of_the_image_goes_from_corner_to_corner_of_its_range() {
        let svg = chart().svg();
        assert!(svg.contains("points=\"80.0,420.0 640.0,40.0\""), "{svg}");
        assert!(svg.contains("a &lt; b") && svg.contains(">two, half<"), "{svg}");
    }
}
