{{/* The container and the volumes of a router's pod: (dict "root" $ "values" the part's). */}}

{{- define "tandem.routerContainer" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $scheme := ternary "HTTPS" "HTTP" $root.Values.tls.enabled -}}
{{- $probes := default dict $values.probes -}}
{{- $alive := dict "path" "/health" "port" "http" "scheme" $scheme -}}
{{- /* Where no worker may be there on purpose, a router has to be reached to say that one is wanted. */}}
{{- $ready := set (deepCopy $alive) "path" (ternary "/health" "/ready" (eq (include "tandem.scalesFromZero" .) "true")) -}}
{{- $startups := max 1 (div (add $values.startupSeconds 1) 2) -}}
name: router
image: {{ include "tandem.image" (merge (dict "device" "cpu") .) | quote }}
command: [tandem, router]
args:
  - --config=/etc/tandem/config.toml
  - --grace={{ $values.drainSeconds }}
  {{- with $values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  {{- include "tandem.commonEnv" . | nindent 2 }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: http
    containerPort: {{ $values.ports.http }}
  - name: control
    containerPort: {{ $values.ports.control }}
lifecycle:
  {{- /* Load balancers still send requests here for a while after the pod was told to end. */}}
  {{- $stop := dict "exec" (dict "command" (list "sleep" ($values.preStopSeconds | toString))) }}
  {{- $lifecycle := dict "preStop" $stop }}
  {{- range $hook, $action := $values.lifecycle }}
  {{- $_ := set $lifecycle $hook $action }}
  {{- end }}
  {{- toYaml $lifecycle | nindent 2 }}
startupProbe:
  {{- include "tandem.probe" (merge (dict "timing" (dict "periodSeconds" 2 "timeoutSeconds" 5 "failureThreshold" $startups) "own" $probes.startup) $alive) | nindent 2 }}
livenessProbe:
  {{- include "tandem.probe" (merge (dict "timing" (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 3) "own" $probes.liveness) $alive) | nindent 2 }}
readinessProbe:
  {{- include "tandem.probe" (merge (dict "timing" (dict "periodSeconds" 2 "timeoutSeconds" 5 "failureThreshold" 2) "own" $probes.readiness) $ready) | nindent 2 }}
resources:
  {{- toYaml $values.resources | nindent 2 }}
volumeMounts:
  {{- include "tandem.commonMounts" $root | nindent 2 }}
  {{- include "tandem.keysMount" $root | nindent 2 }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "tandem.routerVolumes" -}}
{{- include "tandem.commonVolumes" . }}
{{ include "tandem.keysVolume" .root }}
{{- end -}}
